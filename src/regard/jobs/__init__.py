"""Run a model over a corpus in worker processes, and commit the rows of each shard once.

`driver.run_job` runs and resumes a job; `regard.survey` and `regard.policy` define what is measured, by a `ModelSpec`
and a `ModelRunner`. Nothing here is public: `RunOptions`, `Progress` and `SurveyError` are exported by `regard.survey`.
May import `regard.models` and everything below it.

Design notes:
- A worker writes a shard beside its final path, flushes it and reads it back. The driver alone renames it and appends
  one line with a checksum to the manifest; quarantined documents are part of both.
- The model runs in a separate process. Workers record the current document on disk, so a document that kills its
  worker can be identified and quarantined.
- A document's id is its position in the corpus.
- Files are not compressed, so their size shows that rows have constant size. Readers go file by file, because a dataset
  scan keeps the metadata of every file in memory.
"""
