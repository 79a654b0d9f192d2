"""Says at once, and how to help it, when a tracker was chosen whose package is not installed."""

from importlib.util import find_spec

from d9d_dist import UserError


def check_extra(module: str, *, extra: str) -> None:
    """Check that a package can be imported, without importing it.

    Args:
        module: Name of the package.
        extra: The extra of d9d-metrics that has it.

    Raises:
        UserError: If it cannot.
    """
    if find_spec(module) is None:
        raise UserError(
            f"the {extra} tracker needs the package {module}, which is not installed: "
            f"pip install 'd9d-metrics[{extra}]'"
        )
