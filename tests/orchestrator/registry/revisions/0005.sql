CREATE TABLE submissions (
    run TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    number INTEGER NOT NULL,
    submitted_at FLOAT NOT NULL,
    job_id TEXT,
    outcome TEXT NOT NULL,
    PRIMARY KEY (run, attempt, number),
    CONSTRAINT fk_submissions_attempt FOREIGN KEY(run, attempt) REFERENCES attempts (run, number)
);
CREATE INDEX ix_submissions_submitted_at ON submissions (submitted_at);
UPDATE alembic_version SET version_num='0005' WHERE alembic_version.version_num = '0004';
