"""Loading recipes: what beats what, where values came from, and everything that is wrong at once."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qvlopt.errors import Problem, RecipeProblems, UsageError
from qvlopt.recipe.load import LoadedRecipe, load_recipe
from qvlopt.recipe.schema import Recipe

MODEL = "model: {path: builtin:nano}\n"


def written(folder: Path, text: str, *, name: str = "r.yaml") -> Path:
    path = folder / name
    path.write_text(dedent(text), encoding="utf-8")
    return path


def problems(source: object, **given: object) -> list[Problem]:
    with pytest.raises(RecipeProblems) as caught:
        load_recipe(source, **given)  # type: ignore[arg-type]
    return caught.value.problems


def problem(source: object, **given: object) -> Problem:
    (only,) = problems(source, **given)
    return only


def with_model(**sections: object) -> dict[str, object]:
    return {"model": {"path": "builtin:nano"}, **sections}


# A key that does nothing, a number that arrives as text, a duplicate that wins in silence (cases/reports.md, 20).


def test_a_misspelt_key_is_named_with_its_line_and_the_nearest_valid_key(tmp_path: Path) -> None:
    path = written(tmp_path, MODEL + "quantize_awq:\n  grup_size: 32\n")
    assert problem(path) == Problem(f"{path}:3", "quantize_awq.grup_size: unknown key; did you mean group_size?")


def test_a_key_of_another_section_is_sent_home(tmp_path: Path) -> None:
    path = written(tmp_path, MODEL + "quantize_awq:\n  samples: 3\n")
    assert problem(path).message == "quantize_awq.samples: unknown key here; it belongs to calibrate.samples"


def test_a_key_of_a_section_at_the_top_is_sent_home() -> None:
    assert problem(with_model(group_size=3)).message == "group_size: unknown key here; it belongs to quantize_awq.group_size"


def test_a_key_of_another_method_lists_the_valid_keys(tmp_path: Path) -> None:
    path = written(tmp_path, MODEL + "quantize_awq: {damping: 1e-4}\n")
    assert "quantize_awq.damping: unknown key; there are engine, scope, bits" in problem(path).message


def test_a_duplicate_key_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = written(tmp_path, MODEL + "quantize_awq:\n  bits: 4\n  group_size: 64\n  bits: 4\n")
    assert problem(path) == Problem(f"{path}:5", "quantize_awq.bits: given twice, first on line 3")


def test_the_two_spellings_of_a_section_are_one_key(tmp_path: Path) -> None:
    path = written(tmp_path, MODEL + "quantize-awq: {bits: 4}\nquantize_awq: {bits: 4}\n")
    assert problem(path) == Problem(f"{path}:3", "quantize_awq: given twice, first on line 2")


def test_hyphen_and_underscore_are_the_same_in_section_names(tmp_path: Path) -> None:
    loaded = load_recipe(written(tmp_path, MODEL + "quantize-awq: {group_size: 64}\n"), overrides=["quantize-int8.smooth=false"])
    assert loaded.recipe.quantize_awq.group_size == 64
    assert loaded.recipe.quantize_int8.smooth is False


@pytest.mark.parametrize(("text", "value"), [("1e-4", 1e-4), ("2E-5", 2e-5), (".5", 0.5), ("0.05", 0.05), ("'0.05'", 0.05), ("1.e-1", 0.1)])
def test_a_number_is_a_number_in_any_usual_notation(tmp_path: Path, text: str, value: float) -> None:
    assert load_recipe(written(tmp_path, MODEL + f"evaluate: {{gate: {{alpha: {text}}}}}\n")).recipe.evaluate.gate.alpha == value


@pytest.mark.parametrize(("text", "value"), [("128", 128), ("'128'", 128), ("1e2", 100), ("64.0", 64), ("012", 12), ("1_000", 1000)])
def test_a_count_is_read_by_its_field(tmp_path: Path, text: str, value: int) -> None:
    assert load_recipe(written(tmp_path, MODEL + f"calibrate: {{samples: {text}}}\n")).recipe.calibrate.samples == value


@pytest.mark.parametrize("text", ["four", "4.5", "true", "[4]", "{a: 4}", "''", "null", ".nan", ".inf", "1e999", "4 bits"])
def test_what_is_no_count_is_refused(tmp_path: Path, text: str) -> None:
    assert "calibrate.samples: expected a whole number" in problem(written(tmp_path, MODEL + f"calibrate: {{samples: {text}}}\n")).message


@pytest.mark.parametrize(("text", "value"), [("true", True), ("on", True), ("Yes", True), ("off", False), ("NO", False), ("false", False)])
def test_a_switch_takes_the_usual_words(tmp_path: Path, text: str, value: bool) -> None:
    assert load_recipe(written(tmp_path, MODEL + f"export: {{check: {text}}}\n")).recipe.export.check is value


@pytest.mark.parametrize("text", ["1", "0", "maybe", "[true]"])
def test_what_is_no_switch_is_refused(tmp_path: Path, text: str) -> None:
    assert "export.check: expected true or false" in problem(written(tmp_path, MODEL + f"export: {{check: {text}}}\n")).message


@pytest.mark.parametrize("text", ["no", "off", "012", "1e4", "true", "2026-11-30", "12:30:00", "0x1F"])
def test_a_name_stays_as_it_was_written(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, f"model: {{path: x, revision: {text}}}\n")
    assert load_recipe(path).recipe.model.revision == text


def test_a_yaml_1_1_directive_changes_no_value(tmp_path: Path) -> None:
    path = written(tmp_path, "%YAML 1.1\n---\nmodel: {path: off, revision: 012}\nevaluate: {gate: {alpha: 1e-4}}\n")
    recipe = load_recipe(path).recipe
    assert (recipe.model.path, recipe.model.revision, recipe.evaluate.gate.alpha) == ("off", "012", 1e-4)


def test_a_wrong_word_names_the_choices_and_the_nearest(tmp_path: Path) -> None:
    path = written(tmp_path, MODEL + "quantize_awq: {format: compresed-tensors}\n")
    expected = "expected one of awq, compressed-tensors, bf16, got compresed-tensors; did you mean compressed-tensors?"
    assert problem(path).message == f"quantize_awq.format: {expected}"


@pytest.mark.parametrize(
    ("section", "values", "key"),
    [
        ("quantize_awq", {"bits": 8}, "quantize_awq.bits"),
        ("quantize_awq", {"bits": 3, "format": "compressed-tensors"}, "quantize_awq.bits"),
        ("quantize_awq", {"bits": 1, "format": "bf16"}, "quantize_awq.bits"),
        ("quantize_awq", {"bits": 9, "format": "bf16"}, "quantize_awq.bits"),
        ("quantize_awq", {"zero_point": False}, "quantize_awq.zero_point"),
        ("quantize_awq", {"engine": "autoawq", "bits": 8, "format": "bf16"}, "quantize_awq.engine"),
        ("quantize_awq", {"engine": "autoawq", "statistics": "somewhere"}, "quantize_awq.statistics"),
        ("pixels", {"min": 2000, "max": 1999}, "pixels.min"),
        ("evaluate", {"engine": "openai"}, "evaluate.engine"),
        ("evaluate", {"engine": "torch", "server": {"url": "http://127.0.0.1:1"}}, "evaluate.server.url"),
        ("evaluate", {"data": [{"name": "a", "path": "x", "task": "ocr"}, {"name": "a", "path": "y", "task": "vqa"}]}, "evaluate.data.1.name"),
        ("evaluate", {"gate": {"floors": {"orc": 0.5}}}, "evaluate.gate.floors.orc"),
    ],
)
def test_an_impossible_pair_is_refused(section: str, values: dict[str, object], key: str) -> None:
    assert problem(with_model(**{section: values})).message.startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("quantize_awq", {"bits": 8, "format": "compressed-tensors", "zero_point": False}),
        ("quantize_awq", {"bits": 3, "format": "bf16", "zero_point": False}),
        ("pixels", {"min": 1024, "max": 1024}),
        ("evaluate", {"engine": "openai", "server": {"url": "http://127.0.0.1:1"}}),
        ("evaluate", {"gate": {"floors": {"ocr": 0.9, "vqa.vqa_exact": 0.5}}}),
    ],
)
def test_a_possible_pair_is_taken(section: str, values: dict[str, object]) -> None:
    assert load_recipe(with_model(**{section: values})).recipe


@pytest.mark.parametrize("group_size", [0, -1, -128])
def test_a_group_size_below_one_is_refused(group_size: int) -> None:
    message = problem(with_model(quantize_awq={"group_size": group_size})).message
    assert message == f"quantize_awq.group_size: must be greater than or equal to 1, got {group_size}"


@pytest.mark.parametrize("key", ["margin", "alpha"])
@pytest.mark.parametrize("value", [0, 1, -0.1, 1.5, 100])
def test_margin_and_alpha_lie_between_0_and_1(key: str, value: float) -> None:
    assert problem(with_model(evaluate={"gate": {key: value}})).message.startswith(f"evaluate.gate.{key}: must be")


@pytest.mark.parametrize("name", ["../x", "/x", ".hidden", "a/b", ""])
def test_a_name_cannot_lead_out_of_the_output_folder(name: str) -> None:
    assert problem(with_model(name=name)).message.startswith("name: ")


def test_everything_that_is_wrong_is_said_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """\
        model: {path: builtin:nano}
        pixels: {min: 2000, max: 10}
        calibrate: {samples: many}
        quantize-awq:
          grup_size: 32
          zero_point: maybe
          bits: 4
          bits: 4
        evaluate:
          gate: {margin: 1.0}
          data: [{name: a, path: x, task: orc}]
        bench: {images: [big]}
        colour: red
        """,
    )
    found = problems(path, overrides=["seed=x"], flags={"hardware.threads": 0})
    keys = [(where.rpartition(":")[2], message.split(":")[0]) for where, message in found]
    assert keys == [
        ("--set seed=x", "seed"),
        ("--threads", "hardware.threads"),
        ("2", "pixels.min"),
        ("3", "calibrate.samples"),
        ("5", "quantize_awq.grup_size"),
        ("6", "quantize_awq.zero_point"),
        ("8", "quantize_awq.bits"),
        ("10", "evaluate.gate.margin"),
        ("11", "evaluate.data.0.task"),
        ("12", "bench.images.0"),
        ("13", "colour"),
    ]


@pytest.mark.parametrize("sections", [{}, {"model": None}, {"model": {"revision": "main"}}])
def test_a_recipe_without_a_model_is_refused_unless_the_flag_names_one(sections: dict[str, object]) -> None:
    assert "--model" in problem(sections).message
    assert load_recipe(sections, flags={"model.path": "builtin:nano"}).recipe.model.path == "builtin:nano"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {path: x\n", "not YAML"),
        ("- a\n- b\n", "a recipe is a mapping"),
        ("just words\n", "a recipe is a mapping"),
        ("model: {path: x}\n---\nmodel: {path: y}\n", "another document"),
        ("model: {path: !!python/object/apply:os.getcwd []}\n", "the tag"),
        ("model: {path: !secret x}\n", "the tag"),
        ("model: {path: x}\n<<: {seed: 1}\n", "<<: unknown key"),
        ("model: {path: x}\n? [a, b]\n: 1\n", "a key must be one word"),
        ("version: 2\nmodel: {path: x}\n", "version: expected 1, got 2"),
        ("model: {path: x}\nevaluate: {data: []}\n", "evaluate.data: needs at least one entry"),
        ("model: {path: x}\nquantize_awq: {keep: lm_head}\n", "quantize_awq.keep: expected a list"),
        ("model: {path: x}\nquantize_awq: 4\n", "quantize_awq: expected a mapping"),
        ("model: {path: x}\npixels: {min: 4}\n", "pixels.max: is missing"),
    ],
)
def test_a_broken_file_gives_one_problem_with_a_line(tmp_path: Path, text: str, said: str) -> None:
    found = problem(written(tmp_path, text))
    assert said in found.message
    assert re.search(r"r\.yaml:\d+$", found.where)


def test_aliases_cannot_blow_a_recipe_up(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert any("aliases counted" in found.message for found in problems(written(tmp_path, "\n".join(lines))))


def test_an_alias_to_itself_is_refused(tmp_path: Path) -> None:
    assert any("aliases counted" in found.message for found in problems(written(tmp_path, "a: &a {b: *a}\n")))


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    assert "nested too deeply" in problem(written(tmp_path, "[" * 3000)).message


def test_a_harmless_alias_is_followed(tmp_path: Path) -> None:
    path = written(tmp_path, MODEL + "quantize_awq: {keep: &kept [lm_head]}\nquantize_int8: {keep: *kept}\n")
    assert load_recipe(path).recipe.quantize_int8.keep == ("lm_head",)


def test_an_empty_section_has_its_defaults_and_is_present(tmp_path: Path) -> None:
    loaded = load_recipe(written(tmp_path, MODEL + "evaluate:\n"))
    assert loaded.sections == ("evaluate",)
    assert loaded.recipe.evaluate.batch == 8


def test_sections_come_in_the_order_of_the_pipeline(tmp_path: Path) -> None:
    path = written(tmp_path, "evaluate: {}\nquantize-awq: {}\ncalibrate: {}\n" + MODEL)
    assert load_recipe(path, overrides=["bench.repeats=3"]).sections == ("calibrate", "quantize_awq", "evaluate")


# What beats what, and where it came from.


@pytest.fixture
def layered(tmp_path: Path) -> LoadedRecipe:
    path = written(tmp_path, "model: {path: file}\nseed: 1\ncalibrate:\n  samples: 5\n  batch: 2\n")
    settings = ["model.path=set", "seed=2", "calibrate.samples=6", "evaluate.gate={margin: 0.1}", "quantize_awq.keep=[a, b]"]
    return load_recipe(path, overrides=settings, flags={"model.path": "flag", "output": "there"})


def test_a_flag_beats_set_beats_the_file_beats_the_default(layered: LoadedRecipe) -> None:
    recipe = layered.recipe
    assert (recipe.model.path, recipe.seed, recipe.calibrate.batch, recipe.evaluate.batch) == ("flag", 2, 2, 8)
    assert (recipe.calibrate.samples, recipe.evaluate.gate.margin, recipe.quantize_awq.keep) == (6, 0.1, ("a", "b"))


@pytest.mark.parametrize(
    ("key", "origin"),
    [
        ("model.path", "--model"),
        ("output", "--output"),
        ("seed", "--set"),
        ("calibrate.batch", "r.yaml:5"),
        ("evaluate.gate.margin", "--set"),
        ("evaluate.gate.alpha", "default"),
        ("quantize_awq.keep", "--set"),
        ("evaluate.data.1.task", "default"),
        ("hardware.threads", "default"),
    ],
)
def test_every_value_has_an_origin(layered: LoadedRecipe, key: str, origin: str) -> None:
    assert layered.origins[key] == origin


def test_a_setting_reaches_into_a_list() -> None:
    loaded = load_recipe("demo", overrides=["evaluate.data.1.limit=7"])
    assert [entry.limit for entry in loaded.recipe.evaluate.data] == [None, 7, None]
    assert loaded.origins["evaluate.data.1.limit"] == "--set"
    assert loaded.origins["evaluate.data.0.name"].startswith("demo.yaml:")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("seed", "expected key.path=value"),
        ("=3", "expected key.path=value"),
        ("seed=[", "not YAML"),
        ("seed=x", "seed: expected a whole number, got x"),
        ("sead=3", "sead: unknown key; did you mean seed?"),
        ("quantize_awq.grup_size=3", "quantize_awq.grup_size: unknown key; did you mean group_size?"),
        ("name.inner=3", "name: expected text"),
        ("evaluate.data.9.limit=3", "the list has 3 entries"),
        ("quantize_awq.keep=lm_head", "quantize_awq.keep: expected a list"),
    ],
)
def test_a_wrong_setting_names_itself(setting: str, said: str) -> None:
    found = problem("demo", overrides=[setting])
    assert found.where == f"--set {setting}"
    assert said in found.message


def test_a_setting_can_take_a_wrong_value_of_the_file_away(tmp_path: Path) -> None:
    path = written(tmp_path, MODEL + "quantize_awq: {bits: 8}\n")
    assert load_recipe(path, overrides=["quantize_awq.bits=4"]).recipe.quantize_awq.bits == 4


def test_setting_null_empties_an_optional_value() -> None:
    assert load_recipe("demo", overrides=["model.revision=null"]).recipe.model.revision is None
    assert load_recipe("demo", overrides=["model.revision="]).recipe.model.revision is None


def test_name_and_output_follow_the_file_where_it_leaves_them_out(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, MODEL, name="mine.yaml")).recipe
    assert (recipe.name, recipe.output) == ("mine", "out/mine")


def test_output_follows_a_name_that_is_given(tmp_path: Path) -> None:
    assert load_recipe(written(tmp_path, MODEL), overrides=["name=other"]).recipe.output == "out/other"


def test_a_mapping_is_checked_like_a_file() -> None:
    assert load_recipe(with_model(quantize_awq={"keep": ["a"]})).origins["quantize_awq.keep"] == "given"
    assert problem(with_model(quantize_awq={"bits": True})).message == "quantize_awq.bits: expected a whole number, got True"


def test_loading_does_not_change_a_mapping() -> None:
    given = with_model(calibrate={"samples": 4})
    load_recipe(given, overrides=["calibrate.samples=5", "seed=3"])
    assert given == with_model(calibrate={"samples": 4})


def test_a_recipe_cannot_be_changed() -> None:
    recipe = load_recipe("demo").recipe
    with pytest.raises(ValueError, match="frozen"):
        recipe.seed = 3  # type: ignore[misc]


# Finding the file.


@pytest.mark.parametrize(("name", "said"), [("dmeo", "did you mean demo"), ("no/such/file.yaml", "shipped recipes: 3090, 4090d")])
def test_an_unknown_recipe_names_the_shipped_ones(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        load_recipe(name)


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        load_recipe(tmp_path)


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"name: \xff\xfe\n")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_recipe(path)


def test_a_byte_order_mark_and_dos_lines_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + MODEL.encode() + b"seed: 3\r\ncalibrate:\r\n  samples: 9\r\n")
    loaded = load_recipe(path)
    assert (loaded.recipe.seed, loaded.recipe.calibrate.samples, loaded.origins["calibrate.samples"]) == (3, 9, "r.yaml:4")


def test_the_folder_is_the_recipes_own(tmp_path: Path) -> None:
    assert load_recipe(written(tmp_path, MODEL)).folder == tmp_path.resolve()


@given(key=st.text(max_size=20), text=st.text(max_size=60))
def test_no_text_raises_anything_but_usage_errors(key: str, text: str) -> None:
    try:
        recipe = load_recipe("demo", overrides=[f"name={text}", f"{key}=1"]).recipe
    except UsageError:
        return
    assert recipe.model.path == "builtin:nano"


@given(key=st.sampled_from(sorted(Recipe.model_fields)), text=st.text(alphabet="abn 01.-[]{}:,'\"&*!|>\n", max_size=30))
def test_any_value_is_taken_or_refused_by_name(key: str, text: str) -> None:
    setting = f"{key}={text}"
    found: list[Problem] = []
    try:
        load_recipe({"model": {"path": "x"}}, overrides=[setting])
    except RecipeProblems as error:
        found = error.problems
    assert {where for where, _ in found} <= {f"--set {setting}"}


@pytest.mark.parametrize(
    ("file", "name"), [("my recipe é 扫.yaml", "my recipe é 扫"), (".qvlopt.yaml", "qvlopt"), ("a\x1bb.yaml", "ab"), ("..yaml", "recipe")]
)
def test_a_recipe_without_a_name_is_called_like_its_file_as_far_as_a_folder_may_be(tmp_path: Path, file: str, name: str) -> None:
    (tmp_path / file).write_text("model: {path: m}\n", encoding="utf-8")
    recipe = load_recipe(tmp_path / file).recipe
    assert (recipe.name, recipe.output) == (name, f"out/{name}")


def test_a_path_that_is_no_text_in_the_locale_says_what_to_do() -> None:
    with pytest.raises(RecipeProblems, match=r"--output: output: is no text in this locale.*LC_ALL=C\.UTF-8"):
        load_recipe({"model": {"path": "m"}}, flags={"output": "out/\udcc3\udca9"})
