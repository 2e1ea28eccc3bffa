"""A survey from the call to the rows: what it writes, how it is opened, and which arguments it rejects."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")
pytest.importorskip("safetensors")

import pyarrow as pa

import regard
from examples.induction import encode
from regard.jobs.corpus import Corpus
from regard.jobs.driver import RayExecutor
from regard.jobs.model_runner import PickledModel, hash_tokenizer, hash_weights
from regard.jobs.shards import RowBatch, ShardJob, build_record_batch, build_schema
from regard.jobs.worker import format_python_path
from regard.lens.watch import watch
from regard.models import LoadedModel
from regard.survey import RunOptions, SurveyError
from regard.survey.driver import SurveySpec
from regard.survey.schema import MEASURES, list_columns
from tests.helpers.survey_checks import assert_whole, run, write_corpus
from tests.helpers.survey_models import tiny
from tests.helpers.survey_stub import Stub

# -- Writing ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def survey(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("survey") / "out"
    return run(corpus, out, model="tests.helpers.survey_models:tiny", max_tokens=64)


def test_a_survey_has_a_row_for_every_document_layer_and_head(survey, corpus):
    assert_whole(survey.path, corpus, survey, rows_each=4)
    table = survey.dataset.to_table()
    assert table.schema.equals(build_schema(list_columns()))
    assert len(table) == 40 * 4
    assert table.column("layer").to_pylist()[:4] == [0, 0, 1, 1]
    assert set(table.column("tokens").to_pylist()) == {64} and all(table.column("truncated").to_pylist())
    assert repr(survey) == (
        "Survey of tests.helpers.survey_models:tiny: 40 documents, 2,560 tokens, 2 layers, 4 heads, 0 quarantined"
    )


def test_rows_equal_those_of_the_lens(survey, corpus):
    model, _ = tiny()
    text = (corpus / "03.txt").read_text()
    with torch.no_grad(), watch(model) as recording:
        model(encode(text)[:, :64])
    table = recording.heads(encode(text)[0, :64].tolist(), windows=[64])
    ours = survey.to_pandas().query("document == '03.txt'")
    assert ours["module"].tolist() == table.column("module")
    for name in ("entropy", "previous", "distance", "first", "heavy", "duplicate", "induction", "within_64"):
        np.testing.assert_allclose(ours[name], table.column(name), rtol=1e-5)


def test_rows_have_the_same_size_for_any_length(tmp_path):
    options = RunOptions(max_tokens=10_000)
    model = SurveySpec("tests.helpers.survey_models:tiny", MEASURES, options=options).load()

    def size(length):
        rows = model.measure("".join(chr(97 + n * n % 26) for n in range(length)))
        assert rows["tokens"] == length
        batch = build_record_batch([RowBatch("document", None, rows)], build_schema(list_columns()))
        return batch.nbytes / len(batch)

    assert size(256) == size(2048) == size(17)


def test_means_by_head_weight_documents_or_tokens(tmp_path):
    (tmp_path / "corpus").mkdir()
    texts = {"a.txt": "short", "b.txt": "a text that is longer than the other one"}
    for name, text in texts.items():
        (tmp_path / "corpus" / name).write_text(text)
    survey = run(tmp_path / "corpus", tmp_path / "out")
    rows = [Stub().measure(text) for text in texts.values()]
    by_document, by_token = survey.heads(), survey.heads("tokens")
    assert by_document.column("documents").to_pylist() == [2] * 6
    assert by_token.column("tokens").to_pylist() == [sum(map(len, texts.values()))] * 6
    shares = np.array([len(text) for text in texts.values()]) / sum(map(len, texts.values()))
    for name in ("entropy", "kept_128"):
        np.testing.assert_allclose(by_document.column(name), (rows[0][name] + rows[1][name]) / 2, rtol=1e-6)
        expected = shares[0] * rows[0][name] + shares[1] * rows[1][name]
        np.testing.assert_allclose(by_token.column(name), expected, rtol=1e-6)
    np.testing.assert_allclose(
        by_document.column("entropy_histogram").to_pylist(),
        (rows[0]["entropy_histogram"] + rows[1]["entropy_histogram"]) / 2,
        rtol=1e-6,
    )
    with pytest.raises(regard.ArgumentError, match='"documents" or "tokens"'):
        survey.heads("layers")


def test_undefined_values_are_null_and_left_out_of_means(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text("abcdefg")  # no token is repeated
    (tmp_path / "corpus/b.txt").write_text("abcabca")
    survey = run(
        tmp_path / "corpus",
        tmp_path / "out",
        model="tests.helpers.survey_models:tiny",
        measures=["copies", "heavy"],
    )
    table = survey.dataset.to_table()
    assert [name for name in table.schema.names if name in list_columns()] == [
        "heavy",
        "duplicate",
        "induction",
    ]
    assert table.column("induction").to_pylist()[:4] == [None] * 4
    assert survey.heads().column("induction").to_pylist() == table.column("induction").to_pylist()[4:]


def test_frames_have_the_same_rows(survey):
    polars = pytest.importorskip("polars")

    pandas, frame = survey.to_pandas(), survey.to_polars(["document", "entropy"])
    assert isinstance(frame, polars.DataFrame) and frame.columns == ["document", "entropy"]
    assert pandas["entropy"].tolist() == frame["entropy"].to_list()


def test_document_names_are_stored(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": "some text", "name": "the first"}))
    survey = run(tmp_path / "a.jsonl", tmp_path / "out", text_field="body", name_field="name")
    table = survey.dataset.to_table()
    assert set(table.column("name").to_pylist()) == {"the first"}
    assert set(table.column("document").to_pylist()) == {"a.jsonl@0"}


def test_prompts_give_a_column_for_the_lookback_ratio(tmp_path):
    prompt, text = "the prompt. " * 4, "an answer to it. " * 3
    lines = [{"text": text, "prompt": prompt}, {"text": text}, {"text": text, "prompt": ""}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    model = {"model": "tests.helpers.survey_models:tiny"}
    survey = run(tmp_path / "a.jsonl", tmp_path / "out", prompt_field="prompt", **model)
    assert [entry["reason"] for entry in survey.quarantined] == ["the prompt field is of type NoneType"]
    assert survey.settings["measures"] == [*MEASURES, "lookback"]
    rows = survey.to_pandas(["document", "tokens", "lookback"])
    first, empty = (rows[rows.document == name] for name in rows.document.unique())
    assert first.tokens.eq(len(prompt + text)).all() and first.lookback.between(0, 1, "neither").all()
    assert empty.tokens.eq(len(text)).all() and empty.lookback.isna().all()
    assert "lookback" in survey.page().html
    # A survey without prompts has the columns, and the settings, that it always had.
    plain = run(tmp_path / "a.jsonl", tmp_path / "plain")
    assert "lookback" not in plain.settings["columns"] and plain.settings["measures"] == list(MEASURES)
    with pytest.raises(regard.ArgumentError, match="Pass prompt_field"):
        run(tmp_path / "a.jsonl", tmp_path / "none", measures=["lookback"])


def test_a_survey_from_before_there_were_prompts_is_resumed(corpus, tmp_path):
    whole = run(corpus, tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())
    del settings["corpus"]["prompt_field"]
    (tmp_path / "out" / "settings.json").write_text(json.dumps(settings))
    assert run(corpus, tmp_path / "out").documents == whole.documents


def test_progress_is_reported(corpus, tmp_path):
    reports = []
    run(corpus, tmp_path / "out", workers=2, progress=reports.append)
    shards = [report.shards for report in reports]
    assert shards == sorted(shards)
    last = reports[-1]
    assert (last.documents, last.quarantined, last.shards, last.total_shards, last.remaining) == (
        40,
        0,
        8,
        8,
        0.0,
    )
    assert last.tokens == regard.survey.load(tmp_path / "out").tokens
    assert last.tokens_per_second > 0 and last.elapsed > 0


# -- Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"measures": ["entrpy"]}, "measures with 'entrpy'"),
        ({"measures": []}, "no measures"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"workers": 0}, "workers 0"),
        ({"shard_size": 0}, "shard_size 0"),
        ({"executor": "spark"}, "executor 'spark'"),
        ({"model": lambda: None}, "cannot be pickled for a worker"),
    ],
)
def test_invalid_arguments_raise_before_anything_is_written(options, words, corpus, tmp_path):
    with pytest.raises(regard.ArgumentError, match=words):
        run(corpus, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_out_inside_the_corpus_raises(corpus):
    with pytest.raises(regard.ArgumentError, match="inside the corpus"):
        run(corpus, corpus / "out")
    with pytest.raises(regard.ArgumentError, match="inside the corpus"):
        run(f"{corpus}/**/*.parquet", corpus / "out")
    assert not (corpus / "out").exists()


@pytest.mark.parametrize("pattern", ["**/*.jsonl", "*/*.json", "**/lo*", "**/*"])
def test_every_file_that_a_run_writes_counts_as_inside_the_corpus(pattern, tmp_path):
    """Otherwise the survey starts, and cannot be resumed: its own files have changed the corpus."""
    (tmp_path / "deep").mkdir()
    for name in ("a.jsonl", "b.json", "lo.txt"):
        (tmp_path / "deep" / name).write_text('{"text": "words"}\n')
    for scheme in ("", "file://"):
        with pytest.raises(regard.ArgumentError, match="inside the corpus"):
            run(f"{scheme}{tmp_path}/{pattern}", tmp_path / "out")
    for _ in range(2):
        assert run(tmp_path / "deep", tmp_path / "out").complete


def test_a_disk_that_cannot_be_read_is_not_called_full(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"text": "words"}\n')

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("regard.jobs.corpus.iter_lines", fail)
    with pytest.raises(SurveyError, match=r"could not be read: .*Input/output error") as caught:
        run(f"{tmp_path}/*.jsonl", tmp_path / "out")
    assert "space" not in str(caught.value)
    monkeypatch.undo()
    assert run(f"{tmp_path}/*.jsonl", tmp_path / "out").documents == 1


def test_names_are_stored_in_any_locale(tmp_path):
    """Settings are UTF-8 even if the encoding of the locale is ASCII."""
    code = f"""if True:
        import pathlib, regard
        from tests.helpers.survey_stub import Stub
        stub = Stub()
        stub.name = "mod\\u00e8le"
        folder = pathlib.Path({str(tmp_path)!r})
        (folder / "a.txt").write_text("words")
        for _ in range(2):
            regard.survey.run(stub, folder / "a.txt", folder / "out")
    """
    env = {"PYTHONPATH": format_python_path(), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, check=True)
    assert regard.survey.load(tmp_path / "out").settings["model"]["name"] == "modèle"


def test_a_shard_that_ray_returns_twice_is_counted_once(tmp_path):
    """A double of Ray Data that runs everything here, and every shard twice."""

    class Blocks:
        def from_items(self, items, **_):
            self.items = items
            return self

        def map_batches(self, actor, fn_constructor_args, **_):
            self.actor = actor(*fn_constructor_args)
            return self

        def iter_batches(self, **_):
            for item in self.items * 2:
                yield self.actor({"shard": [item["shard"]]})

        ActorPoolStrategy = dict

        class DataContext:
            enable_progress_bars = print_on_execution_start = True

            @classmethod
            def get_current(cls):
                return cls

    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"the words of {name}")
    corpus = Corpus(f"{tmp_path}/*.txt", shard_size=1)
    executor = object.__new__(RayExecutor)
    executor.workers, executor._ray = 1, SimpleNamespace(data=Blocks())
    spec = SurveySpec(PickledModel.dump(Stub(), "survey.run"), MEASURES)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/lock").write_text("this run")
    job = ShardJob(spec, corpus, str(tmp_path / "out"), "this run", list_columns(), Stub().describe())
    counted = []
    results = list(executor.run(job, corpus.iter_shards(), lambda *counts: counted.append(counts)))
    executor._ray.data.actor.worker.close()
    assert len(results) == 6 and counted == [(1, 14, 0)] * 3


def test_a_survey_without_shards_is_empty(survey, tmp_path):
    (tmp_path / "settings.json").write_text(json.dumps(survey.settings))
    fresh = regard.survey.load(tmp_path)
    assert not fresh.complete and fresh.documents == 0 and len(fresh.to_pandas()) == 0
    assert repr(fresh).endswith("0 quarantined, 0 of 8 shards committed")
    table = fresh.heads()
    for name in list_columns():  # numbers and histograms alike
        column = table.column(name).combine_chunks()
        numbers = column if pa.types.is_floating(column.type) else column.flatten()
        assert numbers.null_count == len(numbers) > 0


def test_a_directory_without_a_survey_raises(survey, tmp_path):
    with pytest.raises(regard.ArgumentError, match=r"which contains no settings\.json"):
        regard.survey.load(tmp_path)
    settings = {**survey.settings, "schema_version": 99}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(regard.ArgumentError, match="a survey with schema version 99"):
        regard.survey.load(tmp_path)


@pytest.mark.parametrize("call", ["load('a')", "run('a', 'b', 'c')"])
def test_a_missing_extra_is_named_in_one_line(call):
    code = f"""if True:
        import sys
        sys.modules["pyarrow"] = None
        import regard
        try:
            regard.survey.{call}
        except ImportError as error:
            print(error)
    """
    env = {**os.environ, "PYTHONPATH": format_python_path()}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    name = call.split("(")[0]
    assert done.stdout == f"survey.{name}: pyarrow is not installed. pip install 'regard[survey]'\n"


def test_errors_survive_pickling():
    error = SurveyError("survey.run", received="this", expected="that", hint="Do so.")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is SurveyError and str(again) == str(error) and again.hint == "Do so."


def test_fingerprints_distinguish_models_and_tokenizers():
    (one, encode_bytes), (two, _) = tiny(), tiny(1)
    assert hash_weights(one) == hash_weights(tiny()[0]) != hash_weights(two)
    one.layers[0].norm.weight[3] += 1e-3
    assert hash_weights(one) != hash_weights(tiny()[0])
    assert (
        hash_tokenizer(encode_bytes) == "tests.helpers.survey_models:encode"
        and hash_tokenizer(None) == "bytes"
    )


@pytest.mark.nightly
def test_a_loaded_model_can_be_surveyed(tmp_path):
    model, ids = tiny()
    (tmp_path / "a.txt").write_text("some words")
    loaded = LoadedModel("mine", model, ids)
    survey = regard.survey.run(loaded, tmp_path / "a.txt", tmp_path / "out")
    assert survey.settings["model"]["name"] == "mine" and survey.documents == 1


def test_the_package_is_imported_without_torch():
    code = "import sys, regard.survey; print({'torch', 'transformers', 'matplotlib'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
