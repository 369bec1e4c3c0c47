"""Where the golden cases of ``golden/cases`` and we differ on purpose, and why: one entry a case.

A difference that is not here is a bug. (The cases of ``golden/datakit-*.json`` carry their ``deviation`` themselves.)
"""

from __future__ import annotations

_NOT_FINITE = "DataKit sends NaN, and infinities as large numbers; ours leaves such a value out and counts it"
_MISMATCH = "DataKit guesses which bound a count belongs to; ours sends no buckets where their numbers do not match"
_NO_RESOURCE = "DataKit drops what comes with and after an entry without a resource; to ours it is an empty one"
_EXPONENTIAL = "DataKit drops the buckets of an exponential histogram; ours sends them as those of a histogram"

DEVIATIONS: dict[str, str] = {
    "h_metrics_json_nan": _NOT_FINITE,
    "h_metrics_panic": "DataKit panics over an attribute without a value, all is lost; ours drops the attribute",
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
    "pp_metric": _NOT_FINITE,
    "tc_zero": "DataKit keeps the 0 in __orig_time; ours takes the time of arrival for it",
}
