"""The command `d9d-infer` (`python -m d9d_loop.infer`): runs the inference job of a preset file."""

from d9d_loop.command_line import command_line
from d9d_loop.preset import InferencePresetConfig, look_beside_preset, preset_inference


def main() -> None:
    """Run inference: `d9d-infer PRESET.toml [--section.key VALUE ...]`."""
    with command_line():
        config = InferencePresetConfig.from_cli()
        look_beside_preset()
        print(preset_inference(config).run())


if __name__ == "__main__":
    main()
