"""`provenance_of`: where the log-probs of a result came from."""

from __future__ import annotations

from corelm.backend.engine import OpenEngine
from corelm.spec.provenance import Provenance, VersionRuns
from corelm.spec.records import GenerateResult, ScoreResult


def provenance_of(engine: OpenEngine, batch: GenerateResult | ScoreResult) -> Provenance | tuple[Provenance, ...]:
    """Return the provenance of what the engine returned; see `Backend.provenance`."""
    processed = batch.mode == "processed"
    versions = batch.weight_versions or (engine.version_with(batch.adapter),)
    given = batch.version_runs if isinstance(batch, GenerateResult) else None
    sampling = batch.sampling if isinstance(batch, GenerateResult) else None
    runs: tuple[VersionRuns, ...] = tuple(row if len(row) > 1 else () for row in given or ((),) * len(versions))
    rows = list(zip(versions, runs, strict=True))
    made = {
        (version, of_row): Provenance(
            backend=engine.name,
            model=engine.model_name,
            weight_version=version,
            mode=batch.mode,
            temperature=batch.temperature if processed else 1.0,
            support=batch.support if processed else "full",
            penalties=sampling.penalties if processed and sampling is not None else (),
            adapter=batch.adapter,
            version_runs=of_row,
        )
        for version, of_row in {*rows}
    }
    return made[rows[0]] if len(made) == 1 else tuple(made[row] for row in rows)
