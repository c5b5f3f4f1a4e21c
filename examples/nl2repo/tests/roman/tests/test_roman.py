import subprocess
import sys

import pytest


@pytest.mark.parametrize(("number", "text"), [(1, "I"), (4, "IV"), (1994, "MCMXCIV"), (3999, "MMMCMXCIX")])
def test_there_and_back(number, text):
    from roman import from_roman, to_roman

    assert to_roman(number) == text
    assert from_roman(text.lower()) == number


def test_all_numbers():
    from roman import from_roman, to_roman

    assert [from_roman(to_roman(number)) for number in range(1, 4000)] == list(range(1, 4000))


@pytest.mark.parametrize("text", ["IIII", "VX", ""])
def test_what_is_no_numeral(text):
    from roman import from_roman

    with pytest.raises(ValueError):
        from_roman(text)


def test_the_command():
    done = subprocess.run([sys.executable, "-m", "roman", "42"], capture_output=True, text=True)
    assert done.stdout == "XLII\n"
