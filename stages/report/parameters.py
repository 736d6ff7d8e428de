"""What an analysis is asked for: `analysis:` of params.yaml, and with the cells what its spec holds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.spec import Strict


class Analysis(Strict):
    """`analysis:` of params.yaml.

    title: the report's heading.
    baseline: the model that the others are compared with, at the same scale and budget; null compares with none.
    same_scale: scale -> the one that it counts as, where models of one size differ in depth and so need entries of their own.
    headline: the text set by which the report's summary ranks models; where it was not evaluated, the mean over sets.
    smoothing: a loss curve's value is the mean over this fraction of the run before it; the final loss likewise.
    points: how many points of a loss curve are kept.
    bins_per_octave: position bins per doubling of the position.
    bootstrap: resamples of sequences behind an interval.
    seed: of the resamples.
    unigram_entropy: nats per token, drawn as a line beside the losses of a small study; null draws none.
    split_windows: sliding windows by which tasks are told to be local or global (MesaNet, appendix L.2.1), in a study that trained them all.
    paper: whose printed figures the ledger sets beside ours; null sets none.
    paper_names: our name of a model, scale, budget, set or task -> the paper's, where the built-in list does not know it.
    """

    title: str = "Results"
    baseline: str | None = "transformer"
    same_scale: dict[str, str] = {}
    headline: str = "validation"
    smoothing: float = Field(default=0.02, gt=0, le=1)
    points: int = Field(default=400, ge=2)
    bins_per_octave: int = Field(default=3, ge=1, le=32)
    bootstrap: int = Field(default=200, ge=10)
    seed: int = 0
    unigram_entropy: float | None = None
    split_windows: list[Annotated[int, Field(ge=1)]] = Field(default=[4, 16, 64], min_length=2)
    paper: Literal["mesanet", "palimpsa"] | None = "mesanet"
    paper_names: dict[str, str] = {}


class Cell(Strict):
    """One trained cell of the study, as the spec lists it.

    parameters: count. tokens: trained on. flops: of the whole training run.
    group: the grid itself; references beside it; the sweep over CG steps in training. steps: CG's cap in training, null where the model has no CG.
    learning_rate: its peak. window: that attention sees, null where it is full or there is none. entry: a digest of what params.yaml says of the model, the
    same for models that differ in nothing but their names and learning rates.
    """

    cell: str
    model: str
    scale: str
    budget: str
    layer: str
    parameters: int
    tokens: int
    flops: float
    group: Literal["grid", "references", "sweep"] = "grid"
    steps: int | None = None
    learning_rate: float | None = None
    window: int | None = None
    entry: str | None = None


class Parameters(Analysis):
    """What an analysis' spec holds: `analysis:` and the cells."""

    cells: list[Cell] = Field(min_length=1)

    @model_validator(mode="after")
    def _one_of_each(self) -> Parameters:
        names = [cell.cell for cell in self.cells]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"Cell {twice[0]!r} is listed twice.")
        places: dict[tuple[str, str, str], str] = {}
        for cell in self.cells:
            other = places.setdefault((cell.model, self.same_scale.get(cell.scale, cell.scale), cell.budget), cell.cell)
            if other != cell.cell:
                raise ValueError(f"same_scale makes one of {other!r} and {cell.cell!r}; it joins scales that no model has both of.")
        return self

    def compared_as(self, cell: Cell) -> Cell:
        """The cell under the scale that it counts as; where it has no CG to sweep over, it is no sweep's but a reference."""
        group = "references" if cell.group == "sweep" and cell.steps is None else cell.group
        return cell.model_copy(update={"scale": self.same_scale.get(cell.scale, cell.scale), "group": group})
