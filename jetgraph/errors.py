"""The error that every refusal to compile is."""


class CompileError(RuntimeError):
    """The model cannot run the policy: says which module and why."""
