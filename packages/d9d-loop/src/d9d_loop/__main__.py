"""Command `d9d-train` (`python -m d9d_loop` under torchrun), which runs the training job of a preset file."""

from d9d_loop.cli_main import cli_main
from d9d_loop.config.preset import PresetConfig, look_beside_preset, preset_trainer


def main() -> None:
    """Run training: `d9d-train PRESET.toml [--section.key VALUE ...]`.

    The import paths of a preset are also resolved in the current folder and in the preset's folder.
    """
    with cli_main():
        config = PresetConfig.from_cli()
        look_beside_preset()
        print(preset_trainer(config).train())


if __name__ == "__main__":
    main()
