from pathlib import Path

from d9d_loop.job.source_digests import source_digests


def test_a_changed_configuration_of_the_model_has_another_digest(tmp_path: Path) -> None:
    file, name = tmp_path / "config.json", "the model's config.json"
    assert name not in source_digests(tmp_path)
    file.write_text('{"rope_theta": 10000.0}')
    before = source_digests(tmp_path)
    file.write_text('{"rope_theta": 77.0}')
    after = source_digests(tmp_path)
    assert {key for key in after if after[key] != before[key]} == {name}


def test_the_users_modules_are_named() -> None:
    assert f"the code of {__name__}" in source_digests()
