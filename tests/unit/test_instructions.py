"""What README, CONTRIBUTING, the quickstart and the recipes tell a reader to do, where no test can do it."""

import yaml

from tests.support.pages import ROOT, blocks, commands

QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()


def test_servers_of_the_quickstart_serve_the_checkpoint_of_its_round() -> None:
    """Prompts and the pushed checkpoint are those of the sorting model, which default backends of GPUs cannot run."""
    found = [words for block in blocks("bash") if block.page == "docs/quickstart.md" for words in commands(block.text)]
    cpu, gpu = (words for words in found if "sglang_april.launch_server" in words)
    for server in (cpu, gpu):
        assert server[server.index("--model-path") + 1] == "examples/checkpoints/v0"
    assert "--attention-backend triton --sampling-backend pytorch" in " ".join(gpu)


def test_training_of_the_quickstart_on_gpus_uses_backends_that_run_its_model() -> None:
    on_gpus = QUICKSTART.partition("On GPUs leave out")[2].partition("## Next")[0]
    settings = yaml.safe_load(on_gpus.partition("`server_flags: ")[2].partition("`")[0])
    assert settings == ["--attention-backend=triton", "--sampling-backend=pytorch"]
    assert "colocate: true" in on_gpus
    assert "enable-memory-saver" not in on_gpus, "the bridge adds it"
