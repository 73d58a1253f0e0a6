CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
CREATE TABLE configs (
    digest TEXT NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (digest)
);
CREATE TRIGGER configs_never_UPDATE BEFORE UPDATE ON configs
BEGIN SELECT RAISE(ABORT, 'a config is never changed: runs point at it'); END;
CREATE TRIGGER configs_never_DELETE BEFORE DELETE ON configs
BEGIN SELECT RAISE(ABORT, 'a config is never deleted: runs point at it'); END;
CREATE TRIGGER configs_never_replaced BEFORE INSERT ON configs
WHEN EXISTS (SELECT 1 FROM configs WHERE digest = NEW.digest AND data IS NOT NEW.data)
BEGIN SELECT RAISE(ABORT, 'a config is never changed: runs point at it'); END;
CREATE TABLE runs (
    id INTEGER NOT NULL,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL,
    cluster TEXT NOT NULL,
    run_dir TEXT NOT NULL,
    config_digest TEXT NOT NULL,
    total_steps INTEGER NOT NULL,
    step INTEGER NOT NULL,
    loss FLOAT,
    not_before FLOAT NOT NULL,
    fresh_from INTEGER NOT NULL,
    created_at FLOAT NOT NULL,
    updated_at FLOAT NOT NULL,
    identity TEXT NOT NULL,
    PRIMARY KEY (id),
    UNIQUE (name),
    CONSTRAINT fk_runs_config_digest FOREIGN KEY(config_digest) REFERENCES configs (digest)
);
CREATE INDEX ix_runs_state ON runs (state, id);
CREATE TABLE attempts (
    run TEXT NOT NULL,
    number INTEGER NOT NULL,
    state TEXT NOT NULL,
    nonce TEXT NOT NULL,
    job_name TEXT NOT NULL,
    reason TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    job_id TEXT,
    submit_time TEXT,
    job_state TEXT,
    nodes TEXT NOT NULL,
    excluded TEXT NOT NULL,
    intent_at FLOAT NOT NULL,
    submitted_at FLOAT,
    started_at FLOAT,
    ended_at FLOAT,
    resumed_from INTEGER,
    first_step INTEGER,
    last_step INTEGER,
    saved_step INTEGER,
    generations INTEGER NOT NULL,
    failure TEXT,
    decision TEXT,
    PRIMARY KEY (run, number),
    UNIQUE (job_name),
    CONSTRAINT fk_attempts_run FOREIGN KEY(run) REFERENCES runs (name)
);
CREATE TABLE generations (
    run TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    number INTEGER NOT NULL,
    started_at FLOAT NOT NULL,
    ended_at FLOAT,
    resumed_from INTEGER,
    last_step INTEGER,
    reason TEXT NOT NULL,
    failure TEXT,
    PRIMARY KEY (run, attempt, number),
    CONSTRAINT fk_generations_attempt FOREIGN KEY(run, attempt) REFERENCES attempts (run, number)
);
CREATE TABLE checkpoints (
    run TEXT NOT NULL,
    name TEXT NOT NULL,
    step INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    trust TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    path TEXT NOT NULL,
    committed_at FLOAT NOT NULL,
    reason TEXT NOT NULL,
    PRIMARY KEY (run, name),
    CONSTRAINT fk_checkpoints_run FOREIGN KEY(run) REFERENCES runs (name)
);
CREATE INDEX ix_checkpoints_step ON checkpoints (run, step);
CREATE TABLE transitions (
    id INTEGER NOT NULL,
    run TEXT NOT NULL,
    kind TEXT NOT NULL,
    subject TEXT NOT NULL,
    "before" TEXT NOT NULL,
    "after" TEXT NOT NULL,
    reason TEXT NOT NULL,
    time FLOAT NOT NULL,
    PRIMARY KEY (id),
    CONSTRAINT fk_transitions_run FOREIGN KEY(run) REFERENCES runs (name)
);
CREATE INDEX ix_transitions_run ON transitions (run, id);
CREATE TABLE nodes (
    cluster TEXT NOT NULL,
    name TEXT NOT NULL,
    first_seen FLOAT NOT NULL,
    last_seen FLOAT NOT NULL,
    attempts INTEGER NOT NULL,
    failures INTEGER NOT NULL,
    excluded_until FLOAT NOT NULL,
    reason TEXT NOT NULL,
    PRIMARY KEY (cluster, name)
);
CREATE TABLE lease (
    id INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    holder TEXT NOT NULL,
    renewed_at FLOAT NOT NULL,
    expires_at FLOAT NOT NULL,
    ticked_at FLOAT NOT NULL,
    PRIMARY KEY (id)
);
CREATE TABLE asks (
    id INTEGER NOT NULL,
    run TEXT NOT NULL,
    verb TEXT NOT NULL,
    args TEXT NOT NULL,
    asked_at FLOAT NOT NULL,
    answered_at FLOAT,
    answer TEXT NOT NULL,
    PRIMARY KEY (id),
    CONSTRAINT fk_asks_run FOREIGN KEY(run) REFERENCES runs (name)
);
CREATE INDEX ix_asks_answered_at ON asks (answered_at);
CREATE TABLE cursors (
    run TEXT NOT NULL,
    file TEXT NOT NULL,
    "offset" INTEGER NOT NULL,
    PRIMARY KEY (run, file),
    CONSTRAINT fk_cursors_run FOREIGN KEY(run) REFERENCES runs (name)
);
CREATE TABLE meta (
    "key" TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY ("key")
);
INSERT INTO alembic_version (version_num) VALUES ('0001') RETURNING version_num;
