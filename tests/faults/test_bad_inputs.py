"""The 72 bad inputs and faults, by number: what is done, what comes of it, and which tests prove it.

The common line of every row (nobody else is affected, counters return to zero, nothing of a client's is echoed, OpenAI's shape of errors) is what
`Bench.refuses` and the law of conservation check in each of those tests. Where the outcome differs from the list that the rows are from,
docs/adr/0014-bad-inputs.md says why.
"""

import ast
import asyncio
import functools
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.admission.keys import hashed
from gateway.config.schema import Logs
from gateway.errors import GatewayError
from gateway.http.body import MultipartModel
from gateway.prefix.map import PrefixMap
from gateway.prompt.blocks import Hasher
from gateway.prompt.prompter import Prompter
from gateway.telemetry.logs import configure
from simulator.tokenizer import DATA

TESTS = Path(__file__).parents[1]
FRAMING = "http/test_framing.py::test_no_worker_hears_of_a_request_with"
TAKEN = "http/test_framing.py::test_the_worker_gets_a_plain_request_from_one_with"
REFUSED = "http/test_bodies.py::test_a_body_is_refused_when_it_is_or_has"
UNCHANGED = "http/test_bodies.py::test_the_worker_judges_byte_for_byte"
ILL_FORMED = "http/test_worker_faults.py::test_an_ill_formed_answer_becomes_a_502_and_its_connection_is_closed"
HERE = "faults/test_bad_inputs.py"
NETWORK = "faults/test_fault_proxy.py"

# number: (input, outcome, tests; a case of a parametrized one in brackets)
ROWS: dict[int, tuple[str, str, list[str]]] = {
    1: (
        "Content-Length and Transfer-Encoding",
        "400, closed",
        [
            f"{FRAMING}[both Content-Length and Transfer-Encoding]",
            f"{FRAMING}[both Transfer-Encoding and Content-Length]",
        ],
    ),
    2: ("two different Content-Lengths", "400, closed", [f"{FRAMING}[two different Content-Lengths]"]),
    3: (
        "the same Content-Length twice",
        "400, closed",
        [f"{FRAMING}[the same Content-Length twice]", f"{FRAMING}[a list of Content-Lengths]"],
    ),
    4: (
        "lengths that are none",
        "400, closed",
        [
            f"{FRAMING}[a Content-Length with plus]",
            f"{FRAMING}[a negative Content-Length]",
            f"{FRAMING}[a hexadecimal Content-Length]",
            f"{FRAMING}[a Content-Length with underscore]",
            f"{FRAMING}[a Content-Length in Arabic digits]",
        ],
    ),
    5: (
        "odd Transfer-Encodings",
        "400 or 501, `chunked` in any case is taken",
        [
            f"{FRAMING}[a coding that only ends like chunked]",
            f"{FRAMING}[a coding after chunked]",
            f"{FRAMING}[two Transfer-Encodings]",
            f"{FRAMING}[a vertical tab before chunked]",
            f"{TAKEN}[chunked in other letters]",
        ],
    ),
    6: ("a blank before the colon", "400", [f"{FRAMING}[a blank before the colon]"]),
    7: (
        "bare line ends",
        "400, closed",
        [f"{FRAMING}[bare line feeds]", f"{FRAMING}[a bare carriage return in a value]"],
    ),
    8: ("a folded line", "400", [f"{FRAMING}[a folded line]"]),
    9: (
        "NUL and controls",
        "400",
        [f"{FRAMING}[NUL in a value]", f"{FRAMING}[NUL in a name]", f"{FRAMING}[a control character in a name]"],
    ),
    10: (
        "chunk sizes that are none",
        "400, bounded memory",
        [
            f"{FRAMING}[a chunk size above 64 bits]",
            f"{FRAMING}[a negative chunk size]",
            f"{FRAMING}[a line feed in a chunk extension]",
        ],
    ),
    11: (
        "many chunks of a byte with long extensions",
        "served or refused; extensions go nowhere and are not kept",
        [f"{HERE}::test_long_chunk_extensions_are_neither_kept_nor_passed_on"],
    ),
    12: (
        "trailers that matter",
        "400 for framing, others dropped",
        [f"{TAKEN}[trailers]", f"{FRAMING}[a Content-Length as trailer]"],
    ),
    13: (
        "Expect",
        "100 then as usual; 417",
        [
            "http/test_framing.py::test_continue_is_said_before_the_body_is_sent_and_is_not_passed_on",
            f"{FRAMING}[an expectation that nobody knows]",
        ],
    ),
    14: (
        "an upload that breaks off",
        "no worker hears of it",
        [
            "http/test_framing.py::test_an_upload_that_breaks_off_never_reaches_a_worker",
            "http/test_disconnects.py::test_a_client_that_leaves_while_uploading_never_reaches_a_worker",
        ],
    ),
    15: (
        "pipelined requests",
        "in order, each with its own span; more than 32 wait",
        [
            "http/test_framing.py::test_pipelined_requests_are_answered_in_their_order",
            f"{HERE}::test_hundreds_of_pipelined_requests_are_answered_in_their_order",
        ],
    ),
    16: (
        "bodies that nobody asked for",
        "never the next request",
        ["http/test_framing.py::test_a_body_that_nobody_asked_for_is_never_the_next_request"],
    ),
    17: (
        "targets of other forms",
        "absolute: taken, its authority is no address; authority: 400; *: 404; CONNECT: 405",
        [
            f"{TAKEN}[an absolute target]",
            f"{FRAMING}[an authority as target of a POST]",
            "http/test_framing.py::test_connect_is_no_tunnel",
            "http/test_framing.py::test_other_methods_get_405_with_allow_and_the_connection_goes_on[OPTIONS *]",
        ],
    ),
    18: (
        "other versions, upgrades",
        "400 or 505; plain HTTP/1.1",
        [
            f"{FRAMING}[HTTP/0.9 with version]",
            f"{FRAMING}[the preface of HTTP/2]",
            f"{FRAMING}[HTTP/2.0 in a request line]",
            "http/test_framing.py::test_an_upgrade_is_answered_as_plain_http_and_what_follows_is_dropped[h2c]",
        ],
    ),
    19: (
        "Hosts",
        "400",
        [
            f"{FRAMING}[no Host]",
            f"{FRAMING}[two Hosts]",
            f"{FRAMING}[two different Hosts]",
            f"{FRAMING}[a Host with path and query]",
        ],
    ),
    20: (
        "heads that are too long",
        "400 or 431, in one piece or byte by byte",
        [f"{FRAMING}[200 fields]", f"{FRAMING}[a field of 9 KiB]", f"{FRAMING}[fields of 64 KiB together]"],
    ),
    21: (
        "Connection names what matters",
        "ours can't be named away",
        [
            "http/test_headers.py::test_connection_cannot_name_away_what_the_gateway_adds",
            "http/test_tenants.py::test_connection_cannot_name_a_key_away_before_it_is_looked_at",
        ],
    ),
    22: (
        "fields that name a worker or an address",
        "dropped",
        [
            "http/test_headers.py::test_a_client_cannot_choose_a_worker_or_an_address",
            "http/test_headers.py::test_forwarded_fields_tell_the_worker_who_asked",
        ],
    ),
    23: ("path tricks", "404", ["http/test_api.py::test_a_path_is_taken_as_it_is_written"]),
    24: (
        "a worker's administration",
        "404",
        ["http/test_api.py::test_no_administration_path_of_a_worker_can_be_reached"],
    ),
    25: ("compressed bodies", "415", [f"{FRAMING}[a body in gzip]", f"{FRAMING}[a body in brotli]"]),
    26: (
        "slow heads",
        "408 or closed; others are served",
        ["http/test_slow_clients.py::test_a_head_that_comes_too_slowly_is_answered_408_while_others_are_served"],
    ),
    27: ("slow bodies", "408", ["http/test_slow_clients.py::test_a_body_that_comes_too_slowly_is_answered_408"]),
    28: (
        "clients that do not read",
        "the worker is held back, then let go",
        [
            "http/test_backpressure.py::test_a_worker_is_read_no_faster_than_its_client_reads",
            "http/test_slow_clients.py::test_a_client_that_has_not_read_for_too_long_is_let_go_and_the_worker_with_it",
        ],
    ),
    29: (
        "thousands of idle connections",
        "held; the next gets 503",
        [
            "http/test_slow_clients.py::test_2000_idle_connections_are_held_and_the_next_is_told_that_there_are_too_many",
            "http/test_slow_clients.py::test_an_idle_connection_is_closed_after_keep_alive",
        ],
    ),
    30: (
        "a half-close",
        "documented: the client has left",
        ["http/test_framing.py::test_a_client_that_half_closes_has_left"],
    ),
    31: (
        "a reset in mid-stream",
        "the worker's connection ends, nobody is blamed",
        [
            "http/test_disconnects.py::test_a_client_that_leaves_mid_stream_is_noticed_by_its_worker",
            "http/test_ejection.py::test_what_is_not_the_workers_fault_never_ejects_it",
        ],
    ),
    32: (
        "leaving while it waits, or while tokens are made",
        "gone from the line; no worker hears of it",
        [
            "http/test_admission.py::test_a_waiting_client_that_leaves_is_gone",
            "admission/test_gate.py::test_one_that_leaves_when_its_turn_has_come_gives_its_place_to_the_next",
            "prompt/test_prompter.py::test_a_client_that_leaves_takes_the_text_from_nobody_else",
            f"{HERE}::test_a_client_that_leaves_while_its_prompt_is_tokenized_never_reaches_a_worker",
        ],
    ),
    33: (
        "a burst of five times what the fleet can do",
        "the excess gets 429 with Retry-After, the others are in time, and then all is as before",
        [
            "faults/test_surges.py::test_a_burst_of_five_times_what_the_fleet_can_do_is_refused_as_far_as_it_is_too_much",
            "overload/test_overloaded.py::test_a_loop_that_is_late_again_and_again_refuses_and_recovers",
        ],
    ),
    34: (
        "a tenant that floods",
        "the others keep their share",
        [
            "faults/test_surges.py::test_a_tenant_that_floods_leaves_the_others_their_share",
            "http/test_admission.py::test_tenants_take_turns_however_much_one_asks",
        ],
    ),
    35: (
        "no JSON object",
        "400",
        [
            f"{REFUSED}[an empty body]",
            f"{REFUSED}[no JSON]",
            f"{REFUSED}[an array]",
            f"{REFUSED}[a byte order mark]",
            f"{REFUSED}[UTF-16]",
        ],
    ),
    36: ("nesting", "400, no crash", [f"{REFUSED}[100,000 arrays]", f"{REFUSED}[100,000 objects]"]),
    37: (
        "bodies that are too long",
        "413 before they are read",
        [
            "http/test_bodies.py::test_a_body_that_is_announced_too_long_is_refused_before_it_is_read",
            "http/test_bodies.py::test_an_endless_chunked_upload_is_refused_at_the_limit",
        ],
    ),
    38: (
        "repeated keys",
        "gateway and worker both take the last",
        ["http/test_bodies.py::test_of_a_repeated_model_gateway_and_worker_take_the_last"],
    ),
    39: (
        "numbers that JSON has not",
        "400",
        [
            f"{REFUSED}[NaN]",
            f"{REFUSED}[Infinity]",
            f"{REFUSED}[a number beyond a double]",
            f"{REFUSED}[an integer of 400 digits]",
        ],
    ),
    40: ("no UTF-8", "400", [f"{REFUSED}[bytes that are not UTF-8]", f"{REFUSED}[half of a surrogate pair]"]),
    41: (
        "wrong types",
        "the worker judges",
        [
            f"{UNCHANGED}[messages that are no list]",
            f"{UNCHANGED}[content of five kinds]",
            "prompt/test_prompter.py::test_no_body_makes_it_raise_and_each_one_has_a_reason_or_ids",
        ],
    ),
    42: (
        "models that are not there",
        "404, 400",
        [
            "http/test_bodies.py::test_an_unknown_model_is_not_found",
            "http/test_bodies.py::test_no_model_means_the_only_fleet_and_is_an_error_when_there_are_several",
        ],
    ),
    43: (
        "a prompt that is too long",
        "the worker's own words, no blame",
        [
            "http/test_worker_faults.py::test_an_error_of_the_worker_is_relayed_as_it_came",
            "http/test_ejection.py::test_what_is_not_the_workers_fault_never_ejects_it",
        ],
    ),
    44: (
        "texts that are hard to tokenize",
        "the loop goes on; the request too",
        [
            "prompt/test_prompter.py::test_hostile_texts_take_the_loop_no_long_stretch",
            f"{HERE}::test_texts_that_are_hard_to_tokenize_reach_their_worker_unchanged",
        ],
    ),
    45: ("huge parameters", "the worker judges", [f"{UNCHANGED}[huge parameters]"]),
    46: (
        "special tokens in texts",
        "the worker judges, tokens as it makes them",
        [f"{UNCHANGED}[special tokens]", "prompt/test_parity.py::test_the_ids_are_those_that_the_engine_made"],
    ),
    47: (
        "`stream` that is no boolean",
        "the worker judges",
        [f"{UNCHANGED}[stream as a string]", f"{UNCHANGED}[stream as a number]"],
    ),
    48: (
        "a client's cache_salt where its tenant has one",
        "the tenant's goes over it; no shared hit",
        [
            "http/test_tenants.py::test_a_tenants_salt_goes_over_whatever_the_client_sends",
            "http/test_tenants.py::test_tenants_with_salts_share_no_prefix_and_one_tenant_does",
        ],
    ),
    49: (
        "prompts whose hashes collide",
        "at most a worse choice; each gets its own answer",
        [f"{HERE}::test_prompts_whose_every_hash_collides_still_get_their_own_answers"],
    ),
    50: (
        "a flood of prefixes",
        "within the budget",
        [f"{HERE}::test_a_flood_of_prefixes_stays_within_the_budget_and_the_memory_stays_flat"],
    ),
    51: (
        "malformed trace context",
        "dropped",
        [
            "http/test_headers.py::test_trace_context_travels_only_when_it_is_well_formed",
            "http/test_headers.py::test_a_repeated_traceparent_and_a_huge_tracestate_are_dropped",
            "telemetry/test_spans.py::test_inbound_ignore_begins_a_new_trace_that_knows_nothing_of_the_caller",
        ],
    ),
    52: (
        "no key, a wrong one, an odd one",
        "401, before the body is read; never logged or passed on",
        [
            "http/test_tenants.py::test_without_its_key_nobody_is_let_in_and_no_worker_hears_of_it",
            "http/test_tenants.py::test_a_body_is_not_read_for_a_stranger",
            "http/test_tenants.py::test_the_clients_key_goes_no_further",
            f"{HERE}::test_odd_keys_are_wrong_keys",
        ],
    ),
    53: (
        "a worker refuses",
        "another one is asked",
        ["http/test_retries.py::test_a_refused_connection_is_retried_on_another_worker"],
    ),
    54: (
        "nobody answers a SYN",
        "given up and retried",
        ["http/test_retries.py::test_a_syn_that_nobody_answers_is_given_up_and_retried"],
    ),
    55: (
        "an idle connection closes as we send",
        "retried on a fresh one",
        [
            "http/test_retries.py::test_a_pooled_connection_that_dies_under_a_request_is_replaced_by_a_fresh_one_to_the_same_worker",
            "http/test_retries.py::test_connections_that_are_closed_while_idle_cost_no_request",
        ],
    ),
    56: (
        "a worker that never answers",
        "504; nobody else waits",
        [
            "http/test_timeouts.py::test_a_worker_that_hangs_slows_nobody_else_down",
            f"{NETWORK}::test_a_black_hole_costs_its_own_request_a_504_and_nobody_else_anything",
        ],
    ),
    57: (
        "a collector that is down, slow or refuses",
        "spans are lost and counted",
        [
            "telemetry/test_export_faults.py::test_a_hanging_collector_fills_the_queue_and_no_more",
            "telemetry/test_export_faults.py::test_a_collector_that_refuses_with_413_costs_only_that_batch",
            "telemetry/test_export_faults.py::test_a_process_ends_in_time_though_its_collector_hangs",
        ],
    ),
    58: (
        "a worker declines",
        "another one is asked, or its words relayed",
        [
            "http/test_retries.py::test_a_worker_that_declines_is_asked_once_and_another_answers",
            "http/test_retries.py::test_the_last_workers_own_words_are_relayed_when_all_decline",
        ],
    ),
    59: (
        "a reset right after the head",
        "an error event",
        ["http/test_breaks.py::test_a_break_right_after_the_head_is_told_in_the_stream"],
    ),
    60: (
        "a break in mid-stream",
        "an error event of its own, no [DONE]",
        [
            "http/test_breaks.py::test_a_stream_that_breaks_off_ends_with_an_error_event_and_no_done",
            f"{NETWORK}::test_a_stream_that_is_cut_ends_with_an_error_event_of_its_own_and_no_done[reset_after]",
        ],
    ),
    61: (
        "a body that is too short",
        "as 60",
        [
            "http/test_breaks.py::test_a_fixed_length_answer_that_is_too_short_is_closed_short",
            "http/test_breaks.py::test_a_chunked_answer_that_is_no_stream_is_closed_without_its_last_chunk",
        ],
    ),
    62: (
        "silence in mid-stream",
        "an error event",
        [
            "http/test_timeouts.py::test_a_stream_that_falls_silent_ends_with_an_error_event",
            f"{NETWORK}::test_a_stream_that_is_cut_ends_with_an_error_event_of_its_own_and_no_done[hang_after]",
        ],
    ),
    63: (
        "events cut anywhere, of any line ends and length",
        "byte for byte",
        [
            "http/test_cuts.py::test_a_chunked_body_arrives_the_same_however_it_is_cut",
            "usage/test_usage_event.py::test_any_stream_in_any_cuts_and_framings_is_as_if_seen_whole",
            f"{HERE}::test_an_event_of_a_megabyte_arrives_byte_for_byte",
        ],
    ),
    64: (
        "ill-formed answers",
        "502, nothing of it",
        [
            f"{ILL_FORMED}[NUL in a value]",
            f"{ILL_FORMED}[flood of interim answers]",
            "http/test_worker_faults.py::test_bytes_behind_an_answer_without_a_body_reach_nobody",
        ],
    ),
    65: ("a redirect", "relayed", ["http/test_worker_faults.py::test_a_redirect_is_relayed_and_not_followed"]),
    66: (
        "Set-Cookie, Server, huge heads",
        "filtered, limited",
        [
            "http/test_worker_faults.py::test_fields_that_are_the_workers_own_business_stay_behind",
            f"{ILL_FORMED}[huge head]",
        ],
    ),
    67: (
        "gzip that nobody asked for",
        "as it is",
        ["http/test_worker_faults.py::test_a_coded_answer_is_relayed_as_it_is"],
    ),
    68: (
        "a worker is killed; all are restarted",
        "its own streams fail, nothing else",
        [
            "http/test_soak.py::test_only_what_a_killed_worker_was_serving_fails",
            "faults/test_rolling_restarts.py::test_without_drain_only_streams_on_the_killed_worker_fail",
            "faults/test_rolling_restarts.py::test_with_drain_nothing_fails",
        ],
    ),
    69: (
        "all workers down, then back",
        "503 at once; used again within a check",
        [
            "http/test_retries.py::test_when_no_worker_can_be_reached_the_answer_is_503_at_once",
            "http/test_ejection.py::test_a_worker_that_comes_back_on_its_port_is_used_again_within_a_probe_interval",
        ],
    ),
    70: (
        "a worker that comes and goes",
        "more passes each time, a bounded share",
        [
            "fleet/test_states.py::test_a_flapping_check_needs_one_more_pass_each_time_up_to_ten",
            "http/test_ejection.py::test_at_most_a_share_of_a_fleet_is_ejected",
        ],
    ),
    71: (
        "garbage and floods of events",
        "counted; the map is only a hint",
        [
            "feed/test_floods.py::test_garbage_is_counted_and_nothing_else_happens",
            "feed/test_floods.py::test_200_000_events_are_taken_in_and_the_loop_goes_on",
            "prefix/test_sequence.py::test_a_live_copy_of_a_replayed_batch_is_ignored_even_after_the_replay",
        ],
    ),
    72: (
        "signals, bad files, full disks, no descriptors",
        "nothing is lost",
        [
            "http/test_serve.py::test_a_stream_beyond_the_grace_period_is_told_and_the_exit_is_0",
            "http/test_serve.py::test_a_bad_file_leaves_the_old_configuration_and_says_so_until_it_is_mended",
            "http/test_reload.py::test_requests_never_notice_reloads",
            "telemetry/test_logs.py::test_a_full_disk_costs_lines_and_nothing_else",
            "http/test_serve.py::test_running_out_of_descriptors_ejects_no_worker_and_ends_with_the_shortage",
            "overload/test_descriptors.py::test_a_crowd_beyond_the_descriptors_is_told_so_and_the_gateway_stays_well",
        ],
    ),
}


@functools.cache
def source(file):
    return (TESTS / file).read_text()


@functools.cache
def functions(file):
    return {
        node.name
        for node in ast.walk(ast.parse(source(file)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_row_is_there_once():
    assert list(ROWS) == list(range(1, 73))


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_proved_by_tests_that_exist(row):
    _, _, proofs = ROWS[row]
    assert proofs
    for proof in proofs:
        file, _, rest = proof.partition("::")
        name, _, case = rest.partition("[")
        assert name in functions(file), proof
        assert not case or f'"{case[:-1]}"' in source(file), proof


# What no other test is about.


async def test_long_chunk_extensions_are_neither_kept_nor_passed_on(start, http):
    """Row 11: 5,000 chunks of one byte behind a kilobyte each."""
    bench = await start()
    client = await bench.client()
    body = b'{"model":"m","x":"' + b"y" * 5000 + b'"}'
    await client.sends(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"1;%b\r\n%c\r\n" % (b"e" * 1000, byte) for byte in body)
        + b"0\r\n\r\n"
    )
    peer, request = await bench.worker.receives()
    assert request.body == body
    assert request.get("content-length") == str(len(body))
    await peer.sends(http.answer())
    assert (await client.receives()).status == 200


async def test_hundreds_of_pipelined_requests_are_answered_in_their_order(start):
    """Row 15: 300 at once, far beyond the 32 that are parsed ahead."""
    bench = await start()
    client = await bench.client()
    paths = [f"/v1/models/{number}" for number in range(299)] + ["/v1/models/m"]
    await client.sends(b"".join(f"GET {path} HTTP/1.1\r\nHost: g\r\n\r\n".encode() for path in paths))
    answers = [await client.receives() for _ in paths]
    assert [answer.status for answer in answers] == [404] * 299 + [200]
    assert len({answer.get("x-request-id") for answer in answers}) == 300


TOKENIZED = {"tokenizer": str(DATA), "policy": "kvaware"}


def chat(text):
    return {"model": "m", "user": "tester", "messages": [{"role": "user", "content": text}]}


async def asked(bench, http):
    """(peer, request) of the next chat; the gateway's own questions about the tokenizer are declined."""
    while True:
        _, peer, request = await bench.arrives()
        if request.json.get("user") == "tester":
            return peer, request
        await peer.sends(http.answer(status="404 Not Found", fields=b"connection: close\r\n"))


HARD = {
    "circumflexes": "^" * 1_000_000,
    "letters": "a" * 1_000_000,
    "joined emoji": "\U0001f469\u200d" * 250_000,
    "line feeds": "\n" * 500_000,
}


@pytest.mark.parametrize("text", HARD)
async def test_texts_that_are_hard_to_tokenize_reach_their_worker_unchanged(start, http, text):
    """Row 44: whatever the tokenizer makes of it, and however long it takes."""
    bench = await start(model=TOKENIZED)
    client = await bench.client()
    await client.sends(http.post(chat(HARD[text])))
    peer, request = await asked(bench, http)
    assert request.json["messages"] == chat(HARD[text])["messages"]
    await peer.sends(http.answer())
    assert (await client.receives()).status == 200


async def test_a_client_that_leaves_while_its_prompt_is_tokenized_never_reaches_a_worker(start, http, monkeypatch):
    """Row 32, first half: it is in a thread when its client goes."""
    bench = await start(model=TOKENIZED)
    encoding, gate = asyncio.Event(), asyncio.Event()

    async def never_ready(*_arguments):
        encoding.set()
        await gate.wait()

    monkeypatch.setattr(Prompter, "prompt", never_ready)
    client = await bench.client()
    await client.sends(http.post(chat("many words " * 20_000)))
    await encoding.wait()
    await client.resets()
    await http.until(lambda: bench.outcomes == {"client_gone": 1})
    assert bench.attempts == {}


async def test_prompts_whose_every_hash_collides_still_get_their_own_answers(start, http, monkeypatch):
    """Row 49: the worst that hashes can do. The map is a hint: each request still goes out with its own bytes, and its answer comes back."""
    monkeypatch.setattr(Hasher, "blocks", lambda _self, _parent, packed, size: [7] * (len(packed) // (4 * size)))
    bench = await start(workers=2, model=TOKENIZED)
    for text in ("the first prompt " * 40, "another one " * 50, "and a third " * 60):
        client = await bench.client()
        await client.sends(http.post(chat(text)))
        peer, request = await asked(bench, http)
        assert request.json["messages"] == chat(text)["messages"]
        await peer.sends(http.answer(text.encode(), fields=b"connection: close\r\n"))
        assert (await client.receives()).body == text.encode()
        await bench.settles()
    assert bench.outcomes == {"completed": 3}


KEY = "wr-0123456789abcdefghijklmnop"
ODD_KEYS = {
    "SQL": b"Authorization: Bearer ' OR '1'='1\r\n",
    "the scheme twice": b"Authorization: Bearer Bearer " + KEY.encode() + b"\r\n",
    "bytes that are no text": b"Authorization: Bearer \xff\xfe\xc3\x28\r\n",
    "nothing behind the scheme": b"Authorization: Bearer \r\n",
    "a blank in it": b"Authorization: Bearer wr-0123456789 abcdefghijklmnop\r\n",
    "the key and more": b"Authorization: Bearer " + KEY.encode() + b",x\r\n",
    "8,000 bytes": b"Authorization: Bearer " + b"EVIL" * 2000 + b"\r\n",
    "another scheme": b"Authorization: Digest " + KEY.encode() + b"\r\n",
    "a key in the target": b"",
}


@pytest.mark.parametrize("row", ODD_KEYS)
async def test_odd_keys_are_wrong_keys(start, row):
    """Row 52: 401 for all of them, and the connection carries another request, since nothing is wrong with its framing."""
    bench = await start(tenants={"a": {"keys": [hashed(KEY)]}})
    with capture_logs() as lines:
        client = await bench.client()
        await client.sends(
            b"POST /v1/chat/completions?api_key=%b HTTP/1.1\r\nHost: g\r\n%bContent-Length: 2\r\n\r\n{}"
            % (KEY.encode(), ODD_KEYS[row])
        )
        refusal = await client.receives()
    assert refusal.status == 401
    assert refusal.json["error"]["code"] == "invalid_api_key"
    assert b"EVIL" not in refusal.body
    assert KEY not in str(lines)
    assert bench.worker.connections == 0


def resident():
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_a_flood_of_prefixes_stays_within_the_budget_and_the_memory_stays_flat():
    """Row 50: 320,000 blocks of prompts that never come again, into a map for some 10,000."""
    prefixes = PrefixMap(16, budget=2 * 1024 * 1024)
    holders = [prefixes.join(f"w{number}") for number in range(4)]
    hasher = Hasher(1)
    sizes = []
    for number in range(16_000):
        parent = hasher.root(str(number))
        chain = hasher.blocks(parent, number.to_bytes(4, "little") * 16 * 20, 16)
        prefixes.store(holders[number % 4], chain)
        if number % 2500 == 2499:
            assert prefixes.bytes <= prefixes.budget
            sizes.append(resident())
    assert len(prefixes) > 1000, "it still remembers the latest"
    assert sizes[-1] - sizes[2] < 4 * 1024 * 1024


async def test_an_event_of_a_megabyte_arrives_byte_for_byte(start, http):
    """Row 63: one event, longer than every buffer, in chunks of all sizes."""
    bench = await start()
    client = await bench.client()
    await client.sends(http.post({"model": "m", "stream": True}))
    peer, _ = await bench.worker.receives()
    event = b"data: " + b"0123456789abcdef" * 65_536 + b"\n\n"
    cuts = [event[:1], event[1:70_000], event[70_000:70_003], event[70_003:]]
    sending = asyncio.gather(
        peer.sends(http.SSE_HEAD + b"".join(map(http.chunk, cuts)) + http.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    )
    answer = await client.receives()
    await sending
    assert answer.body == event + b"data: [DONE]\n\n"


def test_malformed_forms_write_no_lines():
    """A client can send any number of them, each of which the parser has a word for."""
    reading, writing = os.pipe()
    logs = configure(Logs(), writing)
    with pytest.raises(GatewayError):
        MultipartModel(b"multipart/form-data; boundary=x", b"--y\r\n\r\n")
    logs.stop()
    os.close(writing)
    assert os.read(reading, 10_000) == b""
    os.close(reading)
