"""Checks that the optional package of a tracker is installed."""

from importlib.util import find_spec

from d9d_dist import UserError


def check_extra(module: str, *, extra: str) -> None:
    """Check that a package is installed, without importing it.

    Args:
        module: Name of the package.
        extra: The extra of d9d-metrics that installs the package.

    Raises:
        UserError: If the package is not installed.
    """
    if find_spec(module) is None:
        raise UserError(
            f"the {extra} tracker needs the package {module}, which is not installed: "
            f"pip install 'd9d-metrics[{extra}]'"
        )
