"""``python -m tests.families``: check every model type, print the table, and exit with 1 if something does not hold."""

import argparse
import os
import sys
from fnmatch import fnmatchcase

from . import running, table
from .special import names

#: One of each kind, for a quick look.
SAMPLE = (
    *("llama", "gpt2", "gemma2", "phi3", "mixtral", "deepseek_v4", "llama4_text", "mamba2", "nemotron_h"),
    # Their caches go wrong, the second's from a length on.
    *("zamba2", "moshi"),
    *("bart", "roberta", "bloom", "qwen3_5_text", "lfm2", "recurrent_gemma"),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.families", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="check these rows; such as '*/folder'")
    parser.add_argument("--sample", action="store_true", help=f"check {len(SAMPLE)} representative rows")
    parser.add_argument("--list", action="store_true", help="print the names of all rows")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many rows to check at a time")
    parser.add_argument("--device", default="cpu", help="where the models are, such as cuda")
    parser.add_argument("--remember", action="store_true", help="write what is right now into right.json")
    args = parser.parse_args()
    known = names()
    if args.list:
        print("\n".join(known))
        return 0
    wanted = known
    if args.sample:
        wanted = list(SAMPLE)
    if args.only:
        wanted = [name for name in known if any(fnmatchcase(name, asked) for asked in args.only)]
        unknown = [asked for asked in args.only if not any(fnmatchcase(name, asked) for name in known)]
        if unknown:
            parser.error(f"unknown rows: {', '.join(unknown)}; --list prints all names")
    right = table.used_to_be_right()
    rows = []
    print(f"{'':34} {'scoring':15}{'generating':15}")
    for row in running.run(wanted, args.processes, args.device):
        rows.append(row)
        print(table.line(row), flush=True)
    text, holds = table.summary(rows, right)
    print(f"\n{text}")
    if args.remember:
        table.remember(rows)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
