"""The tables of the index, and the settings of SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

SCHEMA_VERSION = 3
PRAGMAS = (
    "page_size = 8192",  # a row of tokens fits: on smaller pages each needs an overflow page
    "journal_mode = WAL",
    "synchronous = NORMAL",
    "checkpoint_fullfsync = ON",  # on macOS, where `fsync` leaves data in the drive's cache
    "secure_delete = ON",  # deleted tokens are overwritten
    "wal_autocheckpoint = 128",  # pages; the log counts towards the limit too
    "journal_size_limit = 1048576",
)
# The first generation is random, so that that of an index which was rebuilt is not taken for an
# earlier one's.
SCHEMA = """
CREATE TABLE blocks(
  key BLOB PRIMARY KEY, parent BLOB NOT NULL, namespace BLOB NOT NULL, number INTEGER NOT NULL,
  n_tokens INTEGER NOT NULL, d INTEGER NOT NULL DEFAULT 0, w INTEGER NOT NULL DEFAULT 0,
  s INTEGER NOT NULL DEFAULT 0, w_rows INTEGER NOT NULL DEFAULT 0,
  used REAL NOT NULL, value REAL NOT NULL DEFAULT 0, cost REAL NOT NULL DEFAULT 0,
  children INTEGER NOT NULL DEFAULT 0,
  pins INTEGER NOT NULL DEFAULT 0, deleting INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX by_parent ON blocks(parent);
CREATE INDEX victims ON blocks(used + value + cost)
  WHERE children = 0 AND pins = 0 AND deleting = 0;
CREATE INDEX states ON blocks(parent) WHERE s > 0 AND deleting = 0;
CREATE TABLE tokens(
  parent BLOB, tokens BLOB, key BLOB NOT NULL, PRIMARY KEY(parent, tokens)
) WITHOUT ROWID;
CREATE TABLE pins(key BLOB, owner TEXT, PRIMARY KEY(key, owner)) WITHOUT ROWID;
CREATE TABLE writes(
  id INTEGER PRIMARY KEY, key BLOB NOT NULL, parent BLOB NOT NULL, n_bytes INTEGER NOT NULL,
  writer TEXT NOT NULL
);
CREATE TABLE counts(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO counts VALUES ('bytes', 0), ('blocks', 0);
CREATE TABLE forgotten(
  generation INTEGER NOT NULL, owner TEXT NOT NULL, key BLOB, parent BLOB, n_tokens INTEGER
);
INSERT INTO counts VALUES ('generation', (random() & 0xffffffffff) + 1);
CREATE TRIGGER child_came AFTER INSERT ON blocks BEGIN
  UPDATE blocks SET children = children + 1 WHERE key = NEW.parent;
  UPDATE blocks SET
    children = (SELECT count(*) FROM blocks c WHERE c.parent = NEW.key),
    pins = (SELECT count(*) FROM pins p WHERE p.key = NEW.key) WHERE key = NEW.key;
  UPDATE counts SET value = value + NEW.d + NEW.w + NEW.s WHERE name = 'bytes';
  UPDATE counts SET value = value + 1 WHERE name = 'blocks';
END;
CREATE TRIGGER child_went AFTER DELETE ON blocks BEGIN
  DELETE FROM tokens WHERE parent = OLD.parent AND key = OLD.key;
  UPDATE blocks SET children = children - 1 WHERE key = OLD.parent;
  UPDATE counts SET value = value - OLD.d - OLD.w - OLD.s WHERE name = 'bytes';
  UPDATE counts SET value = value - NOT OLD.deleting WHERE name = 'blocks';
END;
CREATE TRIGGER deleting AFTER UPDATE OF deleting ON blocks WHEN NEW.deleting BEGIN
  DELETE FROM tokens WHERE parent = OLD.parent AND key = OLD.key;
  UPDATE counts SET value = value - NOT OLD.deleting WHERE name = 'blocks';
END;
CREATE TRIGGER size_changed AFTER UPDATE OF d, w, s ON blocks BEGIN
  UPDATE counts SET value = value + NEW.d + NEW.w + NEW.s - OLD.d - OLD.w - OLD.s
    WHERE name = 'bytes';
END;
CREATE TRIGGER pinned AFTER INSERT ON pins BEGIN
  UPDATE blocks SET pins = pins + 1 WHERE key = NEW.key;
END;
CREATE TRIGGER unpinned AFTER DELETE ON pins BEGIN
  UPDATE blocks SET pins = pins - 1 WHERE key = OLD.key;
END;
CREATE TRIGGER write_began AFTER INSERT ON writes BEGIN
  UPDATE counts SET value = value + NEW.n_bytes WHERE name = 'bytes';
END;
CREATE TRIGGER write_ended AFTER DELETE ON writes BEGIN
  UPDATE counts SET value = value - OLD.n_bytes WHERE name = 'bytes';
END;
"""


def statements() -> Iterator[str]:
    """The schema, one statement at a time."""
    statement = ""
    for line in SCHEMA.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
