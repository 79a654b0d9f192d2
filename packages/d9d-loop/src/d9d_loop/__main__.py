"""The command `d9d-train`, or `python -m d9d_loop` under torchrun: trains what a preset names."""

from d9d_loop.command_line import command_line
from d9d_loop.preset import PresetConfig, look_beside_preset, preset_trainer


def main() -> None:
    """Train: `d9d-train PRESET.toml [--section.key VALUE ...]`.

    What a preset names is looked for in the current folder and the preset's own too, as a script's imports would be.
    """
    with command_line():
        config = PresetConfig.from_cli()
        look_beside_preset()
        print(preset_trainer(config).train())


if __name__ == "__main__":
    main()
