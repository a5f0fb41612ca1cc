"""Sessions, turns, API keys."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", sa.String, nullable=False),
        sa.Column("tenant_id", sa.String, nullable=False),
        sa.Column("owner_id", sa.String, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("title", sa.String, nullable=False),
        sa.Column("instructions", sa.String, nullable=False),
        sa.Column("limits", sa.JSON, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("head_turn_id", sa.String),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.Column("extra", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_sessions"),
    )
    op.create_index("ix_sessions_status_updated_at", "sessions", ["status", "updated_at"])
    op.create_index("ix_sessions_tenant_id_status_updated_at", "sessions", ["tenant_id", "status", "updated_at"])
    op.create_table(
        "turns",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), autoincrement=True, nullable=False),
        sa.Column("session_id", sa.String, nullable=False),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("parent_id", sa.String),
        sa.Column("branch_index", sa.BigInteger, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("idempotency_key", sa.String),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("finished_at", sa.Double, nullable=False),
        sa.Column("counted_tokens", sa.BigInteger, nullable=False),
        sa.Column("counted_images", sa.BigInteger, nullable=False),
        sa.Column("usage", sa.JSON, nullable=False),
        sa.Column("input", sa.JSON, nullable=False),
        sa.Column("output_text", sa.Text, nullable=False),
        sa.Column("input_ids", sa.LargeBinary, nullable=False),
        sa.Column("output_ids", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_turns"),
        sa.UniqueConstraint("session_id", "id", name="uq_turns_session_id_id"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name="fk_turns_session_id", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["session_id", "parent_id"], ["turns.session_id", "turns.id"],
                                name="fk_turns_session_id_parent_id"),
    )
    op.create_index("ix_turns_session_id_idempotency_key", "turns", ["session_id", "idempotency_key"], unique=True)
    op.create_index("ix_turns_session_id_parent_id", "turns", ["session_id", "parent_id"])
    op.create_table(
        "api_keys",
        sa.Column("key_hash", sa.String, nullable=False),
        sa.Column("tenant_id", sa.String, nullable=False),
        sa.Column("role", sa.String, nullable=False),
        sa.Column("label", sa.String, nullable=False),
        sa.PrimaryKeyConstraint("key_hash", name="pk_api_keys"),
    )


def downgrade() -> None:
    for table in ("api_keys", "turns", "sessions"):
        op.drop_table(table)
