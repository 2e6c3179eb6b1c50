"""Two files on disk, of the size that is told, pushed as they are saved."""

import json

from safetensors.torch import load_file

from hf_crosscache import artefact


def test_a_folder_holds_two_files_of_the_size_told(tmp_path, translator):
    folder = translator.save_pretrained(tmp_path / "deep" / "er")
    assert sorted(f.name for f in folder.iterdir()) == ["translator.safetensors", "translator_config.json"]
    assert artefact.size_mb(folder) == sum(f.stat().st_size for f in folder.iterdir()) / 1e6


def test_weights_are_half_the_size_in_bfloat16_and_means_stay_float32(tmp_path, translator):
    import torch

    half = load_file(translator.save_pretrained(tmp_path / "a") / "translator.safetensors")
    whole = load_file(translator.save_pretrained(tmp_path / "b", dtype=torch.float32) / "translator.safetensors")
    assert half["layers.0.keys.weight"].dtype == torch.bfloat16 and whole["layers.0.keys.weight"].dtype == torch.float32
    assert half["layers.0.keys.mean_x"].dtype == torch.float32


def test_push_uploads_what_save_writes(monkeypatch, translator):
    seen = {}

    class Api:
        def create_repo(self, repo_id, **settings):
            seen["repo"] = (repo_id, settings)

        def upload_folder(self, *, folder_path, **settings):
            seen["config"] = json.loads((artefact.Path(folder_path) / "translator_config.json").read_text())
            return "commit"

    monkeypatch.setattr(artefact, "HfApi", Api)
    assert translator.push_to_hub("me/translator", private=True) == "commit"
    assert seen["repo"] == ("me/translator", {"private": True, "exist_ok": True})
    assert seen["config"]["target"]["name"] == "qwen3-large"


def test_recording_a_result_leaves_the_tensors_alone(tmp_path, translator):
    import torch

    from hf_crosscache import CacheTranslator

    folder = translator.save_pretrained(tmp_path, dtype=torch.float32)
    before = (folder / "translator.safetensors").read_bytes()
    artefact.record(folder, {"evaluation": {"arms": []}})
    assert (folder / "translator.safetensors").read_bytes() == before
    assert CacheTranslator.from_pretrained(folder).summary == {**translator.summary, "evaluation": {"arms": []}}
