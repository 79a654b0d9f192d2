"""Commands that install what is missing, for error messages of all packages."""

from importlib.metadata import requires


def install_hint(distribution: str, extra: str | None = None) -> str:
    """Return the command that installs the requirements of an extra, or a package of d9d.

    d9d is not on PyPI, where another project has its name. So the command never names a distribution of d9d for an
    index: an extra is given by its packages of other projects, and a package of d9d by its folder in a checkout.

    Args:
        distribution: Package of d9d, such as `d9d-loop`. With an extra, it is installed.
        extra: Name of an extra of the package; None for the package itself.
    """
    if extra is None:
        return f"pip install ./packages/{distribution} (in a checkout of d9d, which is not on PyPI)"
    marker = f"extra == '{extra}'"
    needed = [line.partition(";") for line in requires(distribution) or ()]
    chosen = [name.strip() for name, _, condition in needed if condition.strip().replace('"', "'") == marker]
    foreign = [name for name in chosen if not name.startswith("d9d-")]
    assert foreign, f"{distribution} has no extra {extra} with packages of other projects"
    return f"pip install {' '.join(repr(name) for name in foreign)}"
