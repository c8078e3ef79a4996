"""A pass context inside another one: TVM's replaces the outer settings, this one adds to them."""

from __future__ import annotations

from tvm.ir.transform import PassContext


def with_instruments(*instruments: object) -> PassContext:
    """The current pass context with more instruments; those that it has still run."""
    current = PassContext.current()
    return PassContext(
        opt_level=current.opt_level,
        required_pass=list(current.required_pass),
        disabled_pass=list(current.disabled_pass),
        instruments=[*current.instruments, *instruments],
        config=dict(current.config),
    )
