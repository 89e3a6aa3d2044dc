"""Where prompts come from: JSONL and Parquet files, or problems made up on the spot; with a resumable cursor."""
