ALTER TABLE attempts ADD COLUMN config_digest TEXT DEFAULT '' NOT NULL;
UPDATE attempts SET config_digest = (SELECT config_digest FROM runs WHERE runs.name = attempts.run);
UPDATE alembic_version SET version_num = '0006';
