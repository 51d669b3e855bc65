"""Make torchvision importable with a CPU build of torch. For tests on a CPU; not part of the plugin.

    python tests/engines/sglang/cpu/prepare.py

The operators in torchvision's wheel are linked against CUDA and cannot be loaded here. Importing torchvision then fails
where it registers shape functions for them. This script appends their signatures to `torchvision/extension.py` in the
environment that runs it. The tests never call these operators. Running the script twice is fine.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

MARK = "# Signatures without operators, for a CPU build of torch."
ADDITION = f"""

{MARK}
if not _has_ops():
    _signatures = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _signatures.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    # Look torchvision up without importing it, which would fail.
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise SystemExit("torchvision is not installed here")
    file = Path(spec.origin).with_name("extension.py")
    text = file.read_text()
    if MARK not in text:
        file.write_text(text + ADDITION)
    print(f"patched: {file}")


if __name__ == "__main__":
    main()
