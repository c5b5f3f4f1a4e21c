import ast
from pathlib import Path

import pytest


@pytest.fixture
def photos():
    source = Path("photos.py").read_text()
    tree = ast.parse(source)
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert "pathlib" in names
    assert not names & {"os", "os.path", "glob"}
    import photos

    return photos


def put(path, data=b"x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_pictures(photos, tmp_path):
    wanted = [put(tmp_path / name) for name in ("a.jpg", "deep/er/b.PNG", "deep/c.jpeg")]
    put(tmp_path / "notes.txt")
    put(tmp_path / "no_suffix")
    (tmp_path / "folder.jpg").mkdir()
    assert photos.pictures(tmp_path) == sorted(wanted)
    assert photos.pictures(str(tmp_path)) == sorted(wanted)


def test_target(photos):
    assert photos.target_of(Path("in/my dog.jpg"), 2020, "pets") == Path("2020/pets/my_dog.jpg")
    assert isinstance(photos.target_of("dog.jpg", 2020, "pets"), Path)


def test_free_name(photos, tmp_path):
    path = tmp_path / "a.b.jpg"
    assert photos.free_name(path) == path
    put(path)
    assert photos.free_name(path) == tmp_path / "a.b-1.jpg"
    put(tmp_path / "a.b-1.jpg")
    assert photos.free_name(path) == tmp_path / "a.b-2.jpg"


def test_move(photos, tmp_path):
    first, second = put(tmp_path / "in/my dog.jpg", b"1"), put(tmp_path / "in/deep/my dog.jpg", b"2")
    root = tmp_path / "out"
    assert photos.move(first, root, 2020, "pets") == root / "2020/pets/my_dog.jpg"
    assert photos.move(second, root, 2020, "pets") == root / "2020/pets/my_dog-1.jpg"
    assert (root / "2020/pets/my_dog-1.jpg").read_bytes() == b"2"
    assert not first.exists()


def test_size(photos, tmp_path):
    put(tmp_path / "a.jpg", b"123")
    put(tmp_path / "b/c.png", b"4567")
    put(tmp_path / "d.txt", b"89")
    assert photos.size(tmp_path) == 7


def test_relative(photos, tmp_path):
    assert photos.relative(tmp_path / "a/../b/c.jpg", tmp_path) == Path("b/c.jpg")
    with pytest.raises(ValueError):
        photos.relative(tmp_path / "../c.jpg", tmp_path)


def test_clean(photos, tmp_path):
    (tmp_path / "a/b/c").mkdir(parents=True)
    put(tmp_path / "d/e.jpg")
    (tmp_path / "d/empty").mkdir()
    assert photos.clean(tmp_path) == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d"]
    assert photos.clean(tmp_path) == 0
