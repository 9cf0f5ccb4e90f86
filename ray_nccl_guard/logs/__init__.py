"""Log files of any size, of one rank or many, as evidence: read in pieces, split by rank, kept to the lines that count."""
