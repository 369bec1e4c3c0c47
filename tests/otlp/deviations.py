"""Where the golden cases of ``golden/cases`` and we differ on purpose, and why: one entry a case.

A difference that is not here is a bug. (The cases of ``golden/datakit-*.json`` carry their ``deviation`` themselves.)
"""

from __future__ import annotations

_NOT_FINITE = "DataKit sends NaN, and infinities as large numbers; ours leaves such a value out and counts it"
_MISMATCH = "DataKit guesses which bound a count belongs to; ours sends no buckets where their numbers do not match"
_NO_RESOURCE = "DataKit drops what comes with and after an entry without a resource; to ours it is an empty one"
_EXPONENTIAL = "DataKit drops the buckets of an exponential histogram; ours sends them as those of a histogram"
_NO_VALUE = "DataKit panics over an attribute without a value, all is lost; ours leaves the attribute out"
_NO_RESOURCE_SPANS = "DataKit panics over spans without a resource, all is lost; to ours it is an empty one"
_TWO_SYSTEMS = "DataKit panics over a second *.system attribute, all is lost; ours sends the span"
_DUPLICATE = "of a key in resource and span DataKit drops both where they are neighbours; ours keeps the span's"
_HEX_IDS = "DataKit reads the hex ids of OTLP/JSON as base64; ours reads them as hex"
_EMPTY_BODY = "DataKit drops a record without a body; ours keeps it, with an empty message"
_LISTS = "DataKit prints arrays and kvlists in a debug form, and bytes as nothing; ours: compact JSON, base64"
_TIME_ZERO = "DataKit sends the time 0; ours takes the time of receipt for it"
_PIPELINE = "a pipeline script of DataKit added a field; Locum has no pipelines"
_OLD = "DataKit rewrites a time more than 2 hours away to now; ours keeps it"

DEVIATIONS: dict[str, str] = {
    "h_metrics_json_nan": _NOT_FINITE,
    "h_metrics_panic": "DataKit panics over an attribute without a value, all is lost; ours drops the attribute",
    "l_attr_collide_flatten": "which of hw.id and hw_id counts is random in DataKit; ours: the key without rewriting",
    "l_attr_missing_value": _NO_VALUE,
    "l_attr_reserved": "attributes take the place of message, status and service in DataKit; ours: exported_*",
    "l_attr_types": _LISTS,
    "l_body_array": _LISTS,
    "l_body_empty": _EMPTY_BODY,
    "l_body_unset": _EMPTY_BODY,
    "l_http_json": _HEX_IDS,
    "l_ts_zero": _TIME_ZERO,
    "m_attr_300_tags": "which 256 tags stay is random in DataKit; ours are the first by level and key, and the unit",
    "m_attr_array_kvlist": "DataKit prints arrays and kvlists in a debug form; ours are compact JSON",
    "m_attr_types_resource": "DataKit loses bytes; ours are base64",
    "m_attr_value_missing": "DataKit panics over an attribute without a value; ours drops the attribute",
    "m_exphist": _EXPONENTIAL,
    "m_gauge_nan": _NOT_FINITE,
    "m_hist_bound_inf": "DataKit sends two buckets +Inf, one overwrites the other; ours is the larger",
    "m_hist_fewer_counts": _MISMATCH,
    "m_hist_le_unit_attr_collision": "an attribute le makes DataKit's buckets overwrite each other; ours: exported_le",
    "m_hist_more_counts": _MISMATCH,
    "m_hist_nan_sum_inf": _NOT_FINITE,
    "m_hist_single_bucket": "DataKit drops the only bucket; ours sends it as +Inf (golden histogram-one-bucket)",
    "m_metric_name_empty": "DataKit sends a point without fields; ours leaves the data point out and counts it",
    "m_nil_resource": _NO_RESOURCE,
    "m_nil_resource_second": _NO_RESOURCE,
    "m_nil_resource_second_after_100": _NO_RESOURCE,
    "m_summary": "DataKit drops the quantiles; ours sends one point each, with the tag quantile",
    "m_ts_uint64max": "DataKit takes a time past 2262 for now; ours leaves the data point out and counts it",
    "p_lineproto_gauges": _NOT_FINITE,
    "p_lineproto_noval": "DataKit sends the neighbour of a point without a value twice; ours once",
    "pl_log": _PIPELINE,
    "pl_trace": _PIPELINE,
    "pp_metric": _NOT_FINITE,
    "pp_trace": "NaN and infinities: DataKit sends NaN and large numbers; ours leaves them in message",
    "t_attr_missing_value_selected": _NO_VALUE,
    "t_attr_types_custom": "NaN and infinities: DataKit sends NaN and large numbers; ours leaves them in message",
    "t_attr_types_list": "DataKit sends bytes as invalid UTF-8, ours base64; and it drops both of a key sent twice",
    "t_core_key_override": "attributes take the place of the span's own keys in DataKit; ours stay in message",
    "t_db_panic": _TWO_SYSTEMS,
    "t_db_panic_http": _TWO_SYSTEMS,
    "t_dup_res_span": _DUPLICATE,
    "t_dup_res_span_adjacent": _DUPLICATE,
    "t_error_type_and_exception": "DataKit loses the exception's type to error.type; ours sends it as exception_type",
    "t_events_exception": "DataKit loses the other attributes of the exception it takes out; ours stay in message",
    "t_json_base64_ids": "ids in base64 are no OTLP/JSON; ours refuses them, and says where",
    "t_json_hex_ids": _HEX_IDS,
    "t_nil_resource": _NO_RESOURCE_SPANS,
    "t_nil_resource_http": _NO_RESOURCE_SPANS,
    "t_start_zero": _TIME_ZERO,
    "t_two_systems": _TWO_SYSTEMS,
    "tc_log_old": _OLD,
    "tc_trace_old": _OLD,
    "tc_zero": "DataKit keeps the 0 in __orig_time; ours takes the time of arrival for it",
}
