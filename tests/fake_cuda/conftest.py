"""The stand-in for the CUDA driver, compiled once."""

import shutil

import pytest

from tests.fake_cuda.driver import build


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler, which builds the stand-in")
    return build(tmp_path_factory.mktemp("fake_cuda"))
