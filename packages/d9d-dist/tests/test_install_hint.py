import pytest

from d9d_dist import install_hint as module
from d9d_dist.install_hint import install_hint

REQUIRES = [
    "torch>=2.11",
    "matplotlib>=3.9 ; extra == 'plot'",
    "d9d-pipeline[plot]>=0.1,<0.2 ; extra == 'plot'",
    'wandb<0.31,>=0.22; extra == "wandb"',
    "numpy>=2.0 ; extra == 'wandb'",
]


@pytest.mark.parametrize(
    ("extra", "command"),
    [
        ("plot", "pip install 'matplotlib>=3.9'"),
        ("wandb", "pip install 'wandb<0.31,>=0.22' 'numpy>=2.0'"),
        (None, "pip install ./packages/d9d-loop (in a checkout of d9d, which is not on PyPI)"),
    ],
)
def test_the_command_names_no_package_of_d9d_for_an_index(
    monkeypatch: pytest.MonkeyPatch, extra: str | None, command: str
) -> None:
    monkeypatch.setattr(module, "requires", lambda distribution: REQUIRES)
    assert install_hint("d9d-loop", extra) == command
