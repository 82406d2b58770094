"""Errors about a copy of a bucket name the bucket."""

from lockstep.training.build_data import with_addresses


def said(options, here, sentence):
    return with_addresses(sentence, options, here)


def test_a_folder_is_named_by_its_address(tmp_path):
    (tmp_path / "cache/files").mkdir(parents=True)
    here = {"root": str(tmp_path / "cache/files")}
    sentence = f"{tmp_path}/cache/files has no class folders: put the images into {tmp_path}/cache/files/<class>/."
    expected = "s3://b/p has no class folders: put the images into s3://b/p/<class>/."
    assert said({"root": "s3://b/p/"}, here, sentence) == expected
    assert said({"root": "cache/files"}, here, sentence) == sentence, "a local folder by its own name"


def test_a_table_and_its_images_are_named_by_theirs(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    table = tmp_path / "one/list.csv"
    table.touch()
    sentence = f"{table}, line 2: there is no file {tmp_path}/one/cat/9.png; {tmp_path}/two/8.png."
    options = {"root": "s3://b/p/list.csv", "images": "s3://c/q"}
    here = {"root": str(table), "images": str(tmp_path / "two")}
    assert (
        said(options, here, sentence)
        == "s3://b/p/list.csv, line 2: there is no file s3://b/p/cat/9.png; s3://c/q/8.png."
    )
