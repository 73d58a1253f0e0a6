ALTER TABLE checkpoints ADD COLUMN manifest TEXT DEFAULT '' NOT NULL;
CREATE TABLE restore_tests (test TEXT NOT NULL, run TEXT NOT NULL, checkpoint TEXT NOT NULL, layout TEXT NOT NULL, step INTEGER NOT NULL, begun_at FLOAT NOT NULL, ended_at FLOAT, verdict TEXT NOT NULL, reason TEXT NOT NULL, evidence TEXT NOT NULL, forced INTEGER NOT NULL, PRIMARY KEY (test), CONSTRAINT fk_restore_tests_test FOREIGN KEY(test) REFERENCES runs (name));
CREATE INDEX ix_restore_tests_run ON restore_tests (run, begun_at);
CREATE INDEX ix_restore_tests_ended_at ON restore_tests (ended_at);
UPDATE alembic_version SET version_num='0007';
