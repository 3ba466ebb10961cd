"""Plugin files: found by their path, and what is wrong in them by its line."""

import sys
from pathlib import Path

import pytest

from basecap.data.hashes import file_digest
from basecap.errors import ConfigError
from basecap.plugins import PLUGIN, load_plugin, owner

#: A plugin of one entry.
REGISTERS = (
    'from basecap.registry import Registry\n\nRegistry("thing", "basecap.mixers", "things").add("a", 1, Registry)\n'
)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("x = 1\n\n{}.options\n", 3, "AttributeError: 'dict' object has no attribute 'options'; fix it"),
        ("def f():\n    return 1 / 0\n\n\nf()\n", 2, "ZeroDivisionError: division by zero"),
        ("x = 1\ny = (\n", 2, "SyntaxError: '(' was never closed; fix it."),
        ("import sys\n\nsys.exit()\n", 3, "SystemExit; fix it"),
        ("import json\n\njson.loads('')\n", 3, "JSONDecodeError: "),
        ("raise ValueError('one\\ntwo')\n", 1, "ValueError: one; fix it."),
        ("import not_there\n", 1, "ModuleNotFoundError: No module named 'not_there'; install it."),
        ("import basecap.none\n", 1, "ModuleNotFoundError: No module named 'basecap.none'; fix it."),
    ],
)
def test_a_plugin_that_cannot_be_imported_names_its_line(text, line, words, tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_plugin(path)
    assert str(refused.value).startswith(f"plugin file {path}:{line} cannot be imported: {words}")


@pytest.mark.parametrize("text", ["", "VALUE = 1\n"])
def test_a_plugin_that_registers_nothing_is_refused_every_time(text, tmp_path):
    path = tmp_path / "nothing.py"
    path.write_text(text)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"nothing\.py registers nothing; put @mixer"):
            load_plugin(path)


def test_a_plugin_that_is_no_file_is_not_said_to_be_missing(tmp_path):
    with pytest.raises(ConfigError, match="is not a file; give the path"):
        load_plugin(tmp_path)


def test_a_plugin_that_changes_the_directory_changes_no_path_of_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moves.py").write_text(REGISTERS.replace('"a"', '"moves"') + 'import os\n\nos.chdir("/")\n')
    load_plugin(Path("moves.py"))
    assert Path.cwd() == tmp_path


def test_a_plugin_that_is_a_link_to_itself_is_refused(tmp_path):
    (tmp_path / "loop.py").symlink_to(tmp_path / "loop.py")
    with pytest.raises(ConfigError, match=r"loop\.py does not exist; give the path"):
        load_plugin(tmp_path / "loop.py")


def test_plugins_of_one_name_in_two_directories_are_two_modules(tmp_path):
    files = [tmp_path / place / "alike.py" for place in ("first", "second")]
    for file in files:
        file.parent.mkdir()
        file.write_text(REGISTERS)
    for file in [*files, *files]:
        load_plugin(file)
    held = [sys.modules[name].__file__ for name in sys.modules if name.startswith(f"{PLUGIN}alike")]
    assert held == [str(file) for file in files]


def test_the_digest_of_a_plugin_holds_the_files_beside_it_that_it_imports(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    plugin, package = tmp_path / "helped.py", tmp_path / "helper_package"
    package.mkdir()
    files = [plugin, tmp_path / "helper_module.py", package / "__init__.py", package / "deep.py"]
    files[0].write_text(f"{REGISTERS}import sys\n\n\ndef later():\n    import helper_module\n")
    files[1].write_text("from helper_package import deep\n")
    for file in (*files[2:], tmp_path / "sys.py", tmp_path / "stranger.py"):
        file.write_text("")

    def digest() -> str:
        sys.modules.pop(f"{PLUGIN}helped", None)  # as in a new process
        return load_plugin(plugin)

    seen = [digest()]
    sys.modules[f"{PLUGIN}helped"].later()
    assert sys.modules.pop("helper_module").__file__ == str(files[1])
    for file in files:
        file.write_text(f"{file.read_text()}# changed\n")
        seen.append(digest())
    assert len(set(seen)) == 5
    for name in ("sys.py", "stranger.py"):
        (tmp_path / name).write_text("# changed\n")
    assert digest() == seen[-1]
    files[1].unlink()
    assert digest() == file_digest(plugin)  # as recorded by runs that know only this file
    with pytest.raises(ConfigError, match=r"helped\.py, or a file beside it .*, changed since this command started"):
        load_plugin(plugin, seen[0])


def test_a_plugin_is_not_given_the_file_beside_another_plugin(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    first, second = files = [tmp_path / place / f"imports_{place}.py" for place in ("here", "there")]
    for file in files:
        file.parent.mkdir()
        file.write_text(f"{REGISTERS}import same_name_beside\n")
        file.with_name("same_name_beside.py").write_text("")
    load_plugin(first)
    with pytest.raises(
        ConfigError, match=r"there\.py imports 'same_name_beside', which another .* from .*here, .*rename"
    ):
        load_plugin(second)


def test_an_error_beside_a_plugin_names_its_own_place(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "fails_beside.py").write_text("x = 1\n1 / 0\n")
    (tmp_path / "imports_it.py").write_text("import fails_beside\n")
    with pytest.raises(ConfigError, match=r"^plugin file \S*/fails_beside\.py:2 cannot be imported: ZeroDivisionError"):
        load_plugin(tmp_path / "imports_it.py")


def test_what_a_plugin_imports_from_beside_itself_belongs_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    things = 'THINGS = Registry("thing", "basecap.mixers", "things")\nTHINGS.add("a", 1, Thing)\n'
    (tmp_path / "thing_module.py").write_text(
        f"from basecap.registry import Registry\n\n\nclass Thing:\n    pass\n\n\n{things}"
    )
    (tmp_path / "imports_only.py").write_text("import thing_module\n")
    load_plugin(tmp_path / "imports_only.py")
    assert sys.modules["thing_module"].THINGS.module("a") == owner("thing_module") == f"{PLUGIN}imports_only"
