import pytest

from kvpipe.exceptions import ConfigError
from kvpipe.proxy import Instance

GOOD = {
    "http://h:8100,c:7100": Instance("http://h:8100", "c:7100"),
    " http://h:8100/,127.0.0.1:7100 ": Instance("http://h:8100", "127.0.0.1:7100"),
    "https://h/base": Instance("https://h/base", ""),
    "http://[::1]:8100,[::1]:7100": Instance("http://[::1]:8100", "[::1]:7100"),
}
BAD = [
    "",
    "h:8100",
    "ftp://h:1",
    "http://",
    "http://h:99999",
    "http://h:8100?x=1",
    "http://user:secret@h:8100",
    "http://h:8100,",
    "http://h:8100,c",
    "http://h:8100,c:0",
    "http://h:8100,c:99999",
    "http://h:8100,::1:7100",
    "http://h:8100,c:7100,d:1",
]


@pytest.mark.parametrize(("text", "instance"), GOOD.items())
def test_parse_reads_url_and_control_address(text, instance):
    assert Instance.parse(text) == instance


@pytest.mark.parametrize("text", BAD)
def test_parse_names_the_bad_text_and_the_form_wanted(text):
    with pytest.raises(ConfigError) as error:
        Instance.parse(text)
    assert repr(text.replace("secret", "…")) in str(error.value)
    assert "secret" not in str(error.value)
    assert "http://host:port" in str(error.value)
