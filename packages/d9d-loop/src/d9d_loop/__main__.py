"""The command `d9d-train`, or `python -m d9d_loop` under torchrun: trains what a preset names."""

import sys
from pathlib import Path

from d9d_loop.command_line import command_line
from d9d_loop.preset import PresetConfig, preset_trainer


def main() -> None:
    """Train: `d9d-train PRESET.toml [--section.key VALUE ...]`; what a preset names may be in the current folder."""
    with command_line():
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.insert(0, here)
        print(preset_trainer(PresetConfig.from_cli()).train())


if __name__ == "__main__":
    main()
