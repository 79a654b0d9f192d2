"""Command `d9d-infer` (`python -m d9d_loop.inference`): runs the inference job of a preset file."""

import d9d_loop
from d9d_loop.cli_main import cli_main
from d9d_loop.config.preset import InferencePresetConfig, look_beside_preset


def main() -> None:
    """Run inference: `d9d-infer PRESET.toml [--section.key VALUE ...]`."""
    with cli_main():
        config = InferencePresetConfig.from_cli()
        look_beside_preset()
        print(d9d_loop.preset_inference(config).run())


if __name__ == "__main__":
    main()
