"""Our Relax ops. Importing this package registers them, and their names in TVMScript."""

from relax_passes.op.attention import attention

__all__ = ["attention"]
