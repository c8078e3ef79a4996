"""What a kernel leaves open: parameters that its rule chooses, a tuning record overrides, and
`sits_tvm.tune` searches.

A kernel has parameters for each range of rows that it has code of its own for, a bucket ("1",
"2-32", "33+"). The attribute ``sits.parameters`` of a PrimFunc holds a JSON object of them:
``{"1": {"vectors": 4}, "33+": {"rows": 6, "panel": 4}}``. What it does not name, the rule chooses.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from tvm import s_tir, tirx
from tvm.s_tir.dlight import ScheduleRule
from tvm.sym import Analyzer, ConstIntBound
from tvm.target import Target

from sits_tvm.diagnostics import Diagnostic, SitsError

from ..emit import first_that_holds
from ..tir_nodes import collect
from .work import Work
from .workloads import Workload

ATTRIBUTE = "sits.parameters"
UPPER_BOUNDS = "sits.upper_bounds"
"""The attribute of a PrimFunc for the largest values of its symbolic extents, by name."""

_RANKED = "sits.ranked"
W = TypeVar("W", bound=Workload)


@dataclass(frozen=True)
class Space:
    """The parameters of one bucket.

    Attributes
    ----------
    most : int or None
        The largest number of rows in the bucket; None: there is none.
    rows : int
        The number for which it is tuned.
    default : dataclass
        What the rule chooses.
    choices : mapping of str to ints
        The values that a field of it may take, beside that of the default. Fields without any are
        not tuned.
    """

    most: int | None
    rows: int
    default: Any
    choices: Mapping[str, Sequence[int]]

    def holds(self, rows: tirx.Expr) -> tirx.Expr:
        """Whether a number of rows, beyond earlier buckets, is in this one."""
        assert self.most is not None
        return rows == 1 if self.most == 1 else rows <= self.most

    def values(self, field: str) -> list[int]:
        return sorted({*self.choices[field], getattr(self.default, field)})

    @property
    def default_values(self) -> dict[str, int]:
        return {field: getattr(self.default, field) for field in self.choices}

    def with_values(self, values: Mapping[str, Any]) -> Any:
        """The default with `values` of fields; ValueError if one is outside the space."""
        for field, value in values.items():
            if field not in self.choices:
                raise ValueError(f"no parameter {field!r}; there are {', '.join(self.choices)}")
            if type(value) is not int or value not in self.values(field):
                raise ValueError(f"{field}={value!r}; it takes {self.values(field)}")
        return replace(self.default, **values)


Spaces: TypeAlias = dict[str, Space]
"""By bucket, from few rows to many."""


@dataclass(frozen=True)
class Excerpt:
    """A part of what a kernel computes, to check it by.

    Attributes
    ----------
    func : PrimFunc
        Without a schedule; its output is the part.
    inputs : list of arrays
        Its arguments, but for the output.
    at : list of int
        The positions along the first axis of the kernel's output that the part is.
    terms : int
        Numbers added up for an element of it: how far rounding goes.
    """

    func: tirx.PrimFunc
    inputs: list[np.ndarray]
    at: list[int]
    terms: int


class TunableRule(ScheduleRule, Generic[W]):
    """A rule whose kernels of `families` `sits_tvm.tune` can tune, on targets of `kind`."""

    families: Sequence[str]
    kind: str = "llvm"

    @abstractmethod
    def workload(self, func: tirx.PrimFunc, target: Target) -> W | None:
        """What the database knows `func` by; None if the rule does not tune it."""

    @abstractmethod
    def spaces(self, func: tirx.PrimFunc, target: Target) -> Spaces:
        """The parameters of each bucket that the rows of `func` may be in."""

    @abstractmethod
    def prim_func(self, workload: W, rows: int | None) -> tirx.PrimFunc:
        """The plain function of a workload, which candidates schedule; None: symbolic rows."""

    @abstractmethod
    def inputs(self, workload: W, rows: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Arguments of `prim_func`, but for the output."""

    @abstractmethod
    def excerpt(self, workload: W, rows: int, inputs: list[np.ndarray]) -> Excerpt:
        """A part of the output for `inputs` that the plain function computes in seconds."""

    def fault(self, func: tirx.PrimFunc, target: Target, bucket: str, values: Any) -> str | None:
        """Why there is no kernel with values that the space has one by one; None if there is."""
        return None

    def work(self, func: tirx.PrimFunc, target: Target) -> Callable[[Any], Work | str]:
        """What the kernels of `func` with static rows do, by parameters; or why that is not known.

        Rules of kind "cuda" tell.
        """
        return lambda _parameters: f"{type(self).__name__} does not tell the work of its kernels"


def rule_of(rules: Sequence[ScheduleRule], family: str, kind: str) -> TunableRule:
    """The rule that tunes a family on a kind of target."""
    (found,) = [
        rule
        for rule in rules
        if isinstance(rule, TunableRule) and family in rule.families and kind == rule.kind
    ]
    return found


def reachable(rows: tirx.Expr, spaces: Spaces, func: tirx.PrimFunc | None = None) -> Spaces:
    """The buckets that a number of rows, static or not, may be in.

    `func` may have upper bounds of it, which nothing checks: its last bucket serves any number. It
    runs none of them for 0 rows.
    """
    analyzer, found = Analyzer(), dict[str, Space]()
    bounds = {} if func is None else func.attrs.get(UPPER_BOUNDS, {})
    bounded = [var for var in collect(rows, tirx.Var) if var.name in bounds]
    for var in bounded:
        analyzer.update(var, ConstIntBound(1, max(1, int(bounds[var.name]))))
    for bucket, space in spaces.items():
        known = None if space.most is None else analyzer.simplify(space.holds(rows))
        if isinstance(known, tirx.IntImm) and not known.value:
            continue
        is_last = isinstance(known, tirx.IntImm)
        found[bucket] = replace(space, most=None) if is_last and bounded else space
        if is_last:
            break
    return found


def chosen(func: tirx.PrimFunc, spaces: Spaces) -> dict[str, Any]:
    """The parameters of each bucket: those of the attribute, else the defaults.

    Raises
    ------
    SitsError
        If the attribute names a bucket or parameter that is not there, or a value outside the
        space.
    """
    given = func.attrs.get(ATTRIBUTE)
    try:
        overrides = {} if given is None else json.loads(str(given))
        for bucket in overrides.keys() - spaces.keys():
            raise ValueError(f"no rows {bucket!r}; there are {', '.join(spaces)}")
        return {
            bucket: space.with_values(overrides.get(bucket, {})) for bucket, space in spaces.items()
        }
    except (ValueError, AttributeError) as error:
        message = f"the attribute {ATTRIBUTE} is {given}: {error}"
        help_ = "tune again, or leave it out: there is a default"
        raise SitsError([Diagnostic.error("kernel-parameters", message, help=help_)]) from error


def emit_buckets(
    rows: tirx.Expr, spaces: Spaces, emit: Callable[[str], None], bound: bool = False
) -> None:
    """Code for each bucket; where the number of rows is symbolic, it decides when it runs.

    `bound`: see `first_that_holds`.
    """
    *few, (last, _) = spaces.items()
    branches = [(space.holds(rows), partial(emit, bucket)) for bucket, space in few]
    first_that_holds(branches, partial(emit, last), bound)


def search_space(func: tirx.PrimFunc, spaces: Spaces) -> s_tir.Schedule:
    """`func` with one sampled annotation of its root block per parameter; MetaSchedule's form."""
    schedule = s_tir.Schedule(func)
    root = schedule.get_sblock("root")
    for bucket, space in spaces.items():
        for field in space.choices:
            values = space.values(field)
            value = schedule.sample_categorical(values, [1 / len(values)] * len(values))
            schedule.annotate(root, f"{ATTRIBUTE}.{bucket}.{field}", value)
    return schedule


def sampled(func: tirx.PrimFunc) -> dict[str, dict[str, int]]:
    """What was sampled for each bucket of a function from a `search_space`."""
    found: dict[str, dict[str, int]] = {}
    for name, value in func.body.block.annotations.items():
        if name.startswith(ATTRIBUTE):
            bucket, field = name.removeprefix(f"{ATTRIBUTE}.").split(".")
            found.setdefault(bucket, {})[field] = int(value)
    return found


def tuned_rows(func: tirx.PrimFunc) -> tuple[str, ...]:
    """The buckets that the attribute has parameters for."""
    return tuple(json.loads(str(func.attrs.get(ATTRIBUTE, "{}"))))


def tuned_by(func: tirx.PrimFunc) -> tuple[str, ...]:
    """How the parameters of the attribute were ranked: "measured", "static"."""
    return tuple(json.loads(str(func.attrs.get(_RANKED, "[]"))))


def with_parameters(
    func: tirx.PrimFunc, parameters: Mapping[str, Mapping[str, int]], ranked: Iterable[str] = ()
) -> tirx.PrimFunc:
    func = func.with_attr(ATTRIBUTE, json.dumps(parameters))
    return func.with_attr(_RANKED, json.dumps(sorted(ranked))) if ranked else func
