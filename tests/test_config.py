"""Sources of the token and of UCX."""

from pathlib import Path

import pytest

from kvpipe import ConfigError
from kvpipe.config import resolve_token, resolve_tokens, ucx_wheel_dir


@pytest.fixture
def token_file(tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.write_text(" from the file\n")
    monkeypatch.setenv("KVPIPE_TOKEN_FILE", str(path))
    return path


def test_without_settings_there_is_no_token():
    assert resolve_token() == b""


def test_the_file_gives_the_token_without_the_space_around_it(token_file):
    assert resolve_token() == b"from the file"


def test_the_variable_goes_before_the_file(token_file, monkeypatch):
    monkeypatch.setenv("KVPIPE_TOKEN", "from the variable")
    assert resolve_token() == b"from the variable"


def test_an_empty_variable_counts_as_not_set(token_file, monkeypatch):
    monkeypatch.setenv("KVPIPE_TOKEN", "")
    assert resolve_token() == b"from the file"


def test_the_argument_goes_before_all(token_file, monkeypatch):
    monkeypatch.setenv("KVPIPE_TOKEN", "from the variable")
    assert resolve_token("schlüssel") == "schlüssel".encode()
    assert resolve_token("") == b""


def test_a_file_that_cannot_be_read_is_named(token_file):
    token_file.unlink()
    with pytest.raises(ConfigError, match=f"KVPIPE_TOKEN_FILE='{token_file}' cannot be read"):
        resolve_token()


def test_an_empty_token_file_is_refused_by_name(token_file):
    token_file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty; write the token into it"):
        resolve_token()


def test_a_token_that_is_no_string_is_refused_and_not_shown():
    with pytest.raises(ConfigError, match="token is bytes: expected a string"):
        resolve_token(b"secret")


def test_a_listener_accepts_the_next_token_beside_the_current_one(token_file, tmp_path, monkeypatch):
    assert resolve_tokens() == b"from the file"
    following = tmp_path / "next"
    following.write_text("the next one\n")
    monkeypatch.setenv("KVPIPE_TOKEN_NEXT_FILE", str(following))
    assert resolve_tokens() == (b"from the file", b"the next one")
    assert resolve_tokens("an argument") == (b"an argument", b"the next one")
    assert resolve_token() == b"from the file"
    monkeypatch.setenv("KVPIPE_TOKEN_NEXT", "of the variable")
    assert resolve_tokens() == (b"from the file", b"of the variable")


def test_a_next_token_file_that_cannot_be_read_is_named(token_file, monkeypatch):
    monkeypatch.setenv("KVPIPE_TOKEN_NEXT_FILE", "/removed")
    with pytest.raises(ConfigError, match="KVPIPE_TOKEN_NEXT_FILE='/removed' cannot be read"):
        resolve_tokens()


def test_the_folder_of_the_ucx_wheel_is_found_without_importing_it():
    pytest.importorskip("libucx", reason="the libucx wheel is not installed")
    assert (Path(ucx_wheel_dir()) / "lib").is_dir()
