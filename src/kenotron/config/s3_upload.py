"""`s3_upload`: copy checkpoints to object storage while the run goes on."""

from __future__ import annotations

from kenotron.config.section import Section, key


class S3Upload(Section):
    upload_s3_path: str = key("`s3://bucket/folder` that checkpoints are copied to.")
    remove_after_upload: bool = key("Delete the local copy after its upload.")
    s5cmd_numworkers: int | None = key("Workers of s5cmd.", None, ge=1)
    s5cmd_concurrency: int | None = key("Parts of one file that go up at once.", None, ge=1)
    s5cmd_path: str | None = key("The s5cmd program.", None)
