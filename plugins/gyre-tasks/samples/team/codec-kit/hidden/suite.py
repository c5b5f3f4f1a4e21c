import importlib

import pytest


def part(name):
    return importlib.import_module(f"codecs_kit.{name}")


@pytest.mark.parametrize(("plain", "code"), [("aaab", "3a1b"), ("", ""), ("x" * 20, "9x9x2x"), ("11", "21")])
def test_runs(plain, code):
    assert part("runs").encode(plain) == code
    assert part("runs").decode(code) == plain


@pytest.mark.parametrize("code", ["3", "ab", "0a", "3a1"])
def test_runs_refuses(code):
    with pytest.raises(ValueError):
        part("runs").decode(code)


def test_shift():
    assert part("shift").encode("xyz, ABC é") == "abc, DEF é"
    assert part("shift").decode("abc, DEF é") == "xyz, ABC é"
    assert part("shift").encode("abc", 27) == "bcd"


def test_hexes():
    assert part("hexes").encode("aé") == "61c3a9"
    assert part("hexes").decode("61C3A9") == "aé"


@pytest.mark.parametrize("code", ["6", "zz", "ff"])
def test_hexes_refuses(code):
    with pytest.raises(ValueError):
        part("hexes").decode(code)


@pytest.mark.parametrize("chain", ["runs", "shift|hex", "hex|runs|shift", "runs|runs"])
def test_a_chain_goes_there_and_back(chain):
    import codecs_kit

    text = "Hellooo, wörld 111"
    assert codecs_kit.decode(chain, codecs_kit.encode(chain, text)) == text


def test_a_chain_is_in_order():
    import codecs_kit

    assert codecs_kit.encode("runs|hex", "aaa") == "3361"
    with pytest.raises(ValueError):
        codecs_kit.encode("runs|zip", "a")
