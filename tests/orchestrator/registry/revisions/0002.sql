ALTER TABLE generations ADD COLUMN tier TEXT DEFAULT '' NOT NULL;
ALTER TABLE checkpoints ADD COLUMN tier TEXT DEFAULT '' NOT NULL;
ALTER TABLE checkpoints ADD COLUMN seconds FLOAT;
ALTER TABLE checkpoints ADD COLUMN stall FLOAT;
CREATE TABLE copies (
    run TEXT NOT NULL,
    name TEXT NOT NULL,
    tier TEXT NOT NULL,
    path TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    copied_at FLOAT NOT NULL,
    PRIMARY KEY (run, name, tier),
    CONSTRAINT fk_copies_checkpoint FOREIGN KEY(run, name) REFERENCES checkpoints (run, name)
);
UPDATE alembic_version SET version_num='0002' WHERE alembic_version.version_num = '0001';
