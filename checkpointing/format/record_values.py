"""Where the values of a saved tensor lie within its torch.save archive: by its headers, nothing is unpickled.

Checksums in the archive are not looked at: torch may write none, and a manifest has better ones.
"""

import zipfile

from checkpointing.format.torch_record import MALFORMED, FileSection, ReadAt, offset_of


def locate_values(read: ReadAt, start: int, length: int) -> tuple[int, int]:
    """Place in the file, and number, of the bytes of an archive's only tensor; raises ValueError when it has none."""
    try:
        with zipfile.ZipFile(FileSection(read, start, length)) as archive:
            records = [info for info in archive.infolist() if info.filename.partition("/")[2].startswith("data/")]
        if len(records) != 1 or records[0].compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"it has {len(records)} plain records of values instead of one")
        (record,) = records
        return start + offset_of(read, start, length, record), record.file_size
    except MALFORMED as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
