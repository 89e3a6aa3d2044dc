"""Has a row what its verifier needs? Every row is looked at, before anything starts."""

from __future__ import annotations

from fleuve.config.settings import DataSettings
from fleuve.data.render import VERIFIER_FIELD, row_verifier
from fleuve.data.rows import Row, require_fields
from fleuve.errors import UserError
from fleuve.rewards.code.options import CodeOptions
from fleuve.rewards.code.rows import tests_of
from fleuve.rewards.verifiers import check_name
from fleuve.rewards.weighted import names

_ANY_LIMITS = CodeOptions(deadline=float("inf"))


def check_verified(row: Row, data: DataSettings) -> Row:
    """The row itself: it names a verifier that can be one (or none), and has an answer for those that compare with it,
    and tests for `code`. Your own verifiers may be given an empty answer.

    Raises:
        UserError: with the row's place.
    """
    _check_named(row)
    verifiers = names([row_verifier(row, data)])
    compared = any(name in ("math", "exact") for name in verifiers)
    given = any(_own(name) for name in verifiers) and row.fields.get(data.answer_field, 0) not in ("", None)
    if compared or given:
        require_fields(row, (), [data.answer_field])
    if "code" in verifiers:
        try:
            tests_of(row.fields)
            _ANY_LIMITS.limits(row.fields)
        except ValueError as error:
            raise UserError(f"{row.where}: verifier code: {error}") from None
    return row


def _own(name: str) -> bool:
    return ":" in name and not name.startswith("`")


def _check_named(row: Row) -> None:
    named = row.fields.get(VERIFIER_FIELD)
    if isinstance(named, str):
        try:
            for name in names([named]):
                check_name(name)
        except UserError as error:
            raise UserError(f'{row.where}: field "{VERIFIER_FIELD}": {str(error).partition(": ")[2]}') from None
    elif named is not None:
        raise UserError(f'{row.where}: field "{VERIFIER_FIELD}" is no text; it names who compares answers to the row')
