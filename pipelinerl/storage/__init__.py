"""Forms on disk that several processes share: schema number, checksums, checkpoint folders."""
