"""What several API shapes share: judged fields, error envelopes, answers and their streams."""
