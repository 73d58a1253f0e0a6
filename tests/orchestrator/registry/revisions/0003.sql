CREATE TABLE notices (
    run TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    source TEXT NOT NULL,
    seq INTEGER NOT NULL,
    kind TEXT NOT NULL,
    generation INTEGER NOT NULL,
    time FLOAT NOT NULL,
    node TEXT NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (run, attempt, source, seq),
    CONSTRAINT fk_notices_attempt FOREIGN KEY(run, attempt) REFERENCES attempts (run, number)
);
CREATE INDEX ix_notices_kind ON notices (kind, time);
UPDATE alembic_version SET version_num='0003' WHERE alembic_version.version_num = '0002';
