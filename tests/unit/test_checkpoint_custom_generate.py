"""The `custom_generate/` folder of a checkpoint: MARS decoding by transformers alone."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

import mars_lm
from decoding_reference import biased, hf_greedy
from mars_lm.checkpoint import save
from tiny import tiny_checkpoint, tiny_tokenizer

# What a user writes who has no mars_lm: its import is made to fail, as if it were not installed.
USER = """
import sys
sys.modules["mars_lm"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = torch.tensor([[5, 6, 7], [0, 0, 40]])
mask = torch.tensor([[1, 1, 1], [0, 0, 1]])
arguments = dict(attention_mask=mask, max_new_tokens=20, pad_token_id=0)
mars = dict(custom_generate=folder, trust_remote_code=True)

model = AutoModelForCausalLM.from_pretrained(folder)
plain = model.generate(ids, **arguments, suppress_tokens=[model.config.mars["mask_token_id"]])
assert model.generate(ids, **arguments, **mars).equal(plain)
numbers = model.generate(ids, **arguments, **mars, adaptive=False, return_dict_in_generate=True).mars
assert sum(row.forwards for row in numbers) < sum(len(row.token_ids) for row in numbers)
lossy = model.generate(ids, **arguments, **mars, exact=False, tau=0.0, return_dict_in_generate=True).mars
assert max(max(row.accepted_lengths) for row in lossy) == 4
one = dict(max_new_tokens=4, pad_token_id=0)
text = dict(streamer=TextStreamer(tokenizer), stop_strings=["@@"], tokenizer=tokenizer)
model.generate(ids[:1], **one, **mars, **text)
assert model.generate(ids, **arguments, **mars, kernels="auto").equal(plain)
try:
    model.generate(ids, **arguments, **mars, num_beams=2)
    raise SystemExit("beams were not refused")
except ValueError as error:
    assert "greedy or samples" in str(error)

# Loaded with trust_remote_code, the model's own generate is MARS's.
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
assert model.generate(ids, **arguments).equal(plain)
assert model.generate(input_ids=ids, **arguments, return_dict_in_generate=True).mars
assert model.generate(ids, **arguments, **mars).equal(plain)
assert model.generate(ids, custom_generate=lambda model, input_ids, **_: input_ids, **arguments).equal(ids)
assert not [name for name in sys.modules if name.startswith("mars_lm.")]
print(plain[0, 3:].tolist())
"""


@pytest.fixture(scope="module")
def checkpoint():
    return biased(tiny_checkpoint(), range(60, 80), gain=2.5)


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory):
    place = tmp_path_factory.mktemp("saved") / "a model-v1.5"  # a name that no module could have
    save(checkpoint.model, checkpoint.tokenizer, place)
    return place


def test_transformers_alone_decodes_a_checkpoint(checkpoint, folder, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", USER, str(folder)],
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = hf_greedy(checkpoint, [5, 6, 7], 20)
    assert done.stdout.splitlines()[-1] == str(wanted)


def test_the_folder_holds_all_it_imports_and_says_whence(folder):
    """What transformers looks at: the modules that generate.py reaches, each one's libraries."""
    place = folder / "custom_generate"
    modules = sorted(place.glob("*.py"))
    reached = {place / "generate.py", *map(Path, get_relative_import_files(place / "generate.py"))}
    assert set(modules) == reached
    for module in modules:
        text = module.read_text()
        assert f"mars-lm {mars_lm.__version__}" in text.splitlines()[0]
        ast.parse(text)
        # On the Hub every module's imports are required.
        assert "mars_lm" not in get_imports(module), module.name
    requirements = (place / "requirements.txt").read_text()
    assert f"mars-lm {mars_lm.__version__}" in requirements
    names = {line.split(">=")[0] for line in requirements.splitlines() if not line.startswith("#")}
    assert names == {"torch", "transformers", "numpy"}


def test_a_later_save_renews_the_folder_and_a_plain_model_gets_none(checkpoint, tmp_path):
    save(checkpoint.model, checkpoint.tokenizer, tmp_path / "mars")
    old = tmp_path / "mars" / "custom_generate" / "left_over.py"
    old.write_text("")
    save(checkpoint.model, checkpoint.tokenizer, tmp_path / "mars")
    assert not old.exists()
    assert (tmp_path / "mars" / "custom_generate" / "generate.py").is_file()
    plain = tiny_checkpoint(mars=False)
    save(plain.model, tiny_tokenizer(), tmp_path / "plain")
    assert not (tmp_path / "plain" / "custom_generate").exists()
