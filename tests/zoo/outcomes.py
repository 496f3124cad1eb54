"""The words for what came out, from the best to the worst; plain data that travels between processes and in JSON."""

from dataclasses import asdict, dataclass, field
from typing import Any

SAME = "same"
NOT_RUN = "plain run fails"
NOT_REPEATED = "does not repeat itself"
REFUSED = "refused"
ATTACH_CRASHED = "crashed in attach"
CRASHED = "crashed after attach"
WRONG = "silently wrong"

FROM_BEST_TO_WORST = (SAME, NOT_RUN, NOT_REPEATED, REFUSED, ATTACH_CRASHED, CRASHED, WRONG)
DO_NOT_COUNT = (NOT_RUN, NOT_REPEATED)  # says nothing about offloading


@dataclass(frozen=True)
class Combination:
    """How one comparison is set up."""

    groups: int
    attach_after: int  # steps
    buckets: str  # "default" or "small"
    steps: int
    resume_after: int = 0  # steps: saved there, loaded in a fresh process, and gone on with; 0: not interrupted
    dtype: str = ""  # of the parameters; empty: fp32, or what the class takes

    def __str__(self) -> str:
        groups = f"{self.groups} group{'s' if self.groups > 1 else ''}"
        text = f"{groups}, attached after step {self.attach_after}, {self.buckets} buckets, {self.steps} steps"
        return text + (f", resumed after {self.resume_after}" if self.resume_after else "") + f" {self.dtype}".rstrip()


QUICK = tuple(
    Combination(groups, after, buckets, 10) for groups in (1, 2) for after in (0, 3) for buckets in ("default", "small")
)
SAMPLE = (Combination(1, 0, "default", 10), Combination(2, 3, "small", 10))
LONG = tuple(Combination(one.groups, one.attach_after, one.buckets, 150) for one in SAMPLE)
RESUMED = (Combination(1, 0, "default", 10, 5), Combination(2, 3, "small", 10, 5, "bfloat16"))
FULL = (*QUICK, *LONG, *RESUMED)
COMBINATIONS = {"sample": SAMPLE, "quick": QUICK, "long": LONG, "resumed": RESUMED, "full": FULL}


@dataclass
class Outcome:
    """What came out of one comparison."""

    combination: Combination
    outcome: str
    detail: str = ""


@dataclass
class Row:
    """What came out for one class."""

    library: str
    version: str
    cls: str
    recipe: str = ""
    outcomes: list[Outcome] = field(default_factory=list)
    problem: str = ""  # why the class does not count
    verdict: str = ""  # of the tracer

    def take(self, message: Any) -> None:
        """What :func:`tests.zoo.training.judge` says, and the tracer."""
        if isinstance(message, Outcome):
            self.outcomes.append(message)
        elif isinstance(message, tuple):
            self.recipe, self.problem = str(message[0] or ""), message[1]
        elif isinstance(message, str):
            self.verdict = message

    @property
    def worst(self) -> Outcome | None:
        """The outcome that the class is known by; one that does not count only where there is no other."""
        if not self.outcomes:
            return None
        return max(
            self.outcomes,
            key=lambda one: FROM_BEST_TO_WORST.index(one.outcome) if one.outcome not in DO_NOT_COUNT else -1,
        )

    @property
    def outcome(self) -> str:
        """One of the words above."""
        return self.worst.outcome if self.worst else NOT_RUN

    @property
    def detail(self) -> str:
        """Why."""
        return self.worst.detail if self.worst else self.problem

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "outcome": self.outcome, "detail": self.detail}
