"""Training of the target/drafter pair that ships under ``toolkit/ddtree/bundled``."""
