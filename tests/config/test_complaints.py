"""Each way to get a file wrong: where the complaint points and what it says.

The sign ▲ in a text stands before the character that the complaint must point at and is removed before loading. Texts that
begin with ``+`` come after a model on line 1 that is right.
"""

import pytest

W = "models: [{name: m, workers: [{"
URL = 'url: "http://a:1"'
CAN = W + URL + ", capabilities: "

CASES = {
    # the text as a whole
    "an empty file": ("▲", "empty", "models:"),
    "only a comment": ("▲# nothing\n", "empty"),
    "a list at the top": ("▲- a\n- b\n", "expected a mapping", "got a list"),
    "text at the top": ("▲hello\n", "expected a mapping", '"hello"'),
    "a tab as indentation": ("+pool:\n▲\tidle: 3\n", "tab", "spaces"),
    "a bracket left open": ("models: [1, 2\n▲", "not valid YAML", "line 1"),
    "a quote left open": ("+telemetry:\n  service_name: 'a\n▲", "quote is missing"),
    "a colon too many": ("+grace: 3▲: 4\n", "indentation", "quotes"),
    "a second document": ("+▲---\nmodels: []\n", "second document"),
    "a forbidden character": ("+grace: ▲\x00\n", "U+0000"),
    "an unknown alias": ("+pool: ▲*no\n", "anchor"),
    "an at sign": ("+grace: ▲@x\n", "quotes"),
    "a bad indentation": ("+pool:\n    idle: 1\n  ▲max_idle: 1\n", "indentation"),
    "a tag": ("+pool: ▲!python/object:os.system {}\n", "tag", "remove"),
    "a merge key": ("+pool:\n  ▲<<: {idle: 1}\n", "merge keys"),
    "a list as a key": ("+pool: {▲[a]: 1}\n", "key must be plain text"),
    "an alias that contains itself": ("+pool: ▲&a {idle: *a}\n", "contains itself"),
    "a variable in a flow mapping": ("+pool: {idle: $▲{X}}\n", "in quotes"),
    # keys
    "an unknown key at the top": ("+▲timeout: 3\n", "unknown key", "did you mean `timeouts`?", "Known keys: admin"),
    "an unknown key in a section": ("+pool: {▲idel: 3}\n", "`idle`", "max_idle"),
    "a dash for an underscore": ("+timeouts: {▲first-byte: 3}\n", "`first_byte`"),
    "a key in camel case": ("+limits: {▲bodyRate: 3}\n", "`body_rate`"),
    "a key that belongs elsewhere": ("+▲between_chunks: 3\n", "belongs in `timeouts`"),
    "an unknown key like no other": ("+▲qqqqqqq: 3\n", "unknown key; remove it"),
    "KV events from something that is no address": (
        W + URL + ", kv_events: {endpoint: ▲'10.0.0.7:5557'}}]}]\n",
        "expected an address to connect to",
    ),
    "KV events from what a worker binds": (
        W + URL + ", lmcache_events: {endpoint: 'tcp://a:1', replay_endpoint: ▲'tcp://*:5657'}}]}]\n",
        "write the host under which it can be reached",
    ),
    "KV events from port 70000": (W + URL + ", kv_events: {endpoint: ▲'tcp://a:70000'}}]}]\n", "tcp://10.0.0.7:5557"),
    "KV events by a word that is none": (W + URL + ", kv_events: ▲of}]}]\n", "`auto` or `off`, or a mapping", "`off`"),
    "KV events without an endpoint": (W + URL + ", kv_events: ▲{topic: t}}]}]\n", "`endpoint:`"),
    "KV events as a list": (W + URL + ", kv_events: ▲[a]}]}]\n", "or a mapping"),
    "an unknown key of a worker": (W + URL + ", ▲dirver: vllm}]}]\n", "`driver`", "api_key, capabilities"),
    "a key twice at the top": ("+grace: 1\n▲grace: 2\n", "given twice", "line 2"),
    "a key twice deep down": (W + URL + ", id: a, ▲id: b}]}]\n", "given twice"),
    "a key twice in parameters": (
        "+policies: {p: {preset: session, parameters: {header: a, ▲header: b}}}\n",
        "given twice",
    ),
    "a policy twice": ("+policies: {p: {preset: p2c}, ▲p: {preset: p2c}}\n", "given twice"),
    # types
    "text for a number": ("+retries: {attempts: ▲many}\n", "whole number from 1 to 10", '"many"'),
    "a number in quotes": ('+retries: {attempts: ▲"3"}\n', "remove the quotes"),
    "a fraction for a whole number": ("+retries: {attempts: ▲1.5}\n", "whole number"),
    "an octal number": ("+listen: {port: ▲010}\n", "whole number"),
    "a number below its range": ("+retries: {attempts: ▲0}\n", "from 1 to 10", "the number 0"),
    "a number above its range": ("+listen: {port: ▲65536}\n", "from 0 to 65535"),
    "a share above 1": ("+retries: {budget: ▲20}\n", "from 0 to 1"),
    "infinity": ("+retries: {budget: ▲.inf}\n", "a number from 0 to 1"),
    "not a number": ("+retries: {budget: ▲nan}\n", "a number from 0 to 1"),
    "a huge number": (f"+pool: {{max_idle: ▲{'9' * 29}}}\n", "makes no sense"),
    "a number of 5,000 digits": (f"+pool: {{max_idle: ▲{'9' * 5000}}}\n", "whole number of at least 0"),
    "yes for true": ("+headers: {worker: ▲yes}\n", "true or false", "write `true`"),
    "off for false": ("+headers: {worker: ▲off}\n", "write `false`"),
    "a number for text": ("models: [{name: ▲7, workers: [{" + URL + "}]}]\n", "text", "the number 7", 'quotes: "7"'),
    "a boolean for text": ("+telemetry: {service_name: ▲true}\n", "text", "quotes"),
    "nothing for text": ("+telemetry: {service_name: ▲}\n", "text", "got nothing"),
    "empty text for a name": ('models: [{name: ▲"", workers: [{' + URL + "}]}]\n", "1 to 256", "empty"),
    "a section left empty": ("+pool:▲\n", "expected a mapping", "remove the key"),
    "a list for a section": ("+pool: ▲[1]\n", "expected a mapping", "got a list"),
    "text for a list": ("models: [{name: m, aliases: ▲a, workers: [{" + URL + "}]}]\n", "a list of texts", "[ ]"),
    "a mapping for models": ("models: ▲{m: {}}\n", "a list of mappings", "got a mapping"),
    "a list for text": ("+telemetry: {service_name: ▲[a]}\n", "expected text", "a list"),
    "a choice misspelt": ("+telemetry: {logs: {level: ▲warn}}\n", "`warning`", "did you mean"),
    "a status that is no choice": ("+retries: {statuses: [502, ▲404]}\n", "429", "502"),
    # units
    "an unknown unit of time": ("+grace: ▲30 sec\n", "duration", "`30s`"),
    "an unknown unit of size": ("+limits: {body: ▲64mb}\n", "size", "`64MB`"),
    "a size in part of a byte": ("+limits: {body: ▲0.3B}\n", "size"),
    "a negative duration": ("+grace: ▲-1\n", "duration", "-1"),
    "a duration of centuries": ("+grace: ▲99999999d\n", "8760h", "no sense"),
    # what is missing
    "no models": ("▲grace: 3\n", "missing", "`models:`"),
    "a model without name": ("models: [▲{workers: [{" + URL + "}]}]\n", "missing", "`name:`"),
    "a model without workers": ("models: [▲{name: m}]\n", "missing", "`workers:`"),
    "a worker without URL": ("models: [{name: m, workers: [▲{driver: vllm}]}]\n", "missing", "`url:`"),
    "an empty list of models": ("models: ▲[]\n", "at least one model"),
    "an empty list of workers": ("models: [{name: m, workers: ▲[]}]\n", "at least one worker"),
    # URLs
    "a URL without scheme": (W + 'url: ▲"10.0.0.1:8000"}]}]\n', "`http://10.0.0.1:8000`"),
    "a URL with a wrong scheme": (W + 'url: ▲"ftp://a"}]}]\n', "http:// or https://"),
    "a URL without host": (W + 'url: ▲"http://:80"}]}]\n', "host is missing"),
    "a URL with a query": (W + 'url: ▲"http://a?b=c"}]}]\n', "without a query"),
    "a URL with a password": (W + 'url: ▲"http://u:p@a"}]}]\n', "api_key"),
    "a URL with a bad port": (W + 'url: ▲"http://a:99999"}]}]\n', "malformed"),
    "a URL with port 0": (W + 'url: ▲"http://a:0"}]}]\n', "port 0"),
    "a URL with a space": (W + 'url: ▲"http://a b"}]}]\n', "without spaces"),
    "a URL with /v1": (W + 'url: ▲"http://a:1/v1/"}]}]\n', "/v1"),
    "a collector without scheme": ("+telemetry: {traces: {endpoint: ▲collector}}\n", "http:// or https://"),
    # names that do not exist
    "an unknown driver": (W + URL + ", driver: ▲vlm}]}]\n", "`vllm`", "neuron, openai"),
    "an unknown profile": (W + URL + ", capabilities: {profile: ▲trn2-70}}]}]\n", "`trn2-70b`", "inf2-8b"),
    "an unknown policy": ("models: [{name: m, policy: ▲leastlaod, workers: [{" + URL + "}]}]\n", "leastload"),
    "an unknown preset": ("+policies: {p: {preset: ▲sesion}}\n", "session"),
    "an unknown filter": ("+policies: {p: {filters: [{type: ▲healty}]}}\n", "healthy"),
    "an unknown scorer": ("+policies: {p: {scorers: [{type: ▲inflight}]}}\n", "in-flight"),
    "an unknown picker": ("+policies: {p: {picker: {type: ▲lowest}}}\n", "lowest-cost"),
    "a module that does not exist": ("+policies: {p: {picker: {type: ▲no_such:Thing}}}\n", "cannot import", "no_such"),
    "an unknown parameter of a preset": ("+policies: {p: {preset: session, parameters: {▲heder: x}}}\n", "header"),
    "an unknown parameter of a step": (
        "+policies:\n  p:\n    scorers:\n      - {type: in-flight}\n      - {type: session, parameters: {▲coockie: x}}\n",
        "cookie",
    ),
    "a parameter of a wrong type": ("+policies: {p: {preset: session, parameters: {▲max_load_factor: x}}}\n", "float"),
    "a negative weight": ("+policies: {p: {scorers: [{type: random, weight: ▲-1}]}}\n", "at least 0"),
    "a weight of a filter": ("+policies: {p: {filters: [{type: healthy, weight: ▲2}]}}\n", "only scorers"),
    "a policy of nothing": ("+policies: {p: ▲{}}\n", "neither a preset nor"),
    "a preset with steps": ("+policies: {p: {preset: ▲p2c, filters: [{type: healthy}]}}\n", "not both"),
    # things given twice
    "a model twice": (
        "models:\n- {name: m, workers: [{" + URL + "}]}\n- {name: ▲m, workers: [{" + URL + "}]}\n",
        "taken",
        "line 2",
    ),
    "an alias that is a name": (
        "models: [{name: m, aliases: [x, ▲m], workers: [{" + URL + "}]}]\n",
        "alias",
        "models[0].name",
    ),
    "an alias in two fleets": (
        "models:\n- {name: m, aliases: [a], workers: [{"
        + URL
        + "}]}\n- {name: n, aliases: [▲a], workers: [{"
        + URL
        + "}]}\n",
        "models[0].aliases[0]",
    ),
    "a worker twice": (W + URL + '}, {url: ▲"http://A:1/"}]}]\n', "same worker as models[0].workers[0]"),
    "an id twice": (W + URL + ', id: x}, {url: "http://b:1", id: ▲x}]}]\n', "taken by models[0].workers[0]", "another"),
    "a default id twice": (W + 'url: "http://a:1/x"}, {url: ▲"http://a:1/y"}]}]\n', "a:1", "`id:` of its own"),
    # values that contradict each other
    "one port for both listeners": ("+listen: {port: 80}\nadmin: {port: ▲80}\n", "`listen` too"),
    "the admin port on all interfaces": ("+admin: {host: 0.0.0.0, port: ▲8080}\n", "`listen` too"),
    "the default admin port for clients": ("+listen: {port: ▲8081}\n", "`admin` too"),
    "idle as long as the workers' keep-alive": (
        "+pool: {idle: ▲5s}\n",
        "worker_keep_alive",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE",
    ),
    "a keep-alive below idle": ("+pool: {worker_keep_alive: ▲2s}\n", "must be closed before"),
    "checks without pause": ("+health: {interval: ▲0}\n", "more than 0"),
    "a model's checks without timeout": (
        "models: [{name: m, health: {timeout: ▲0}, workers: [{" + URL + "}]}]\n",
        "more than 0",
    ),
    "a health path without slash": ("+health: {path: ▲health}\n", "/health"),
    "a window of no time": ("+retries: {budget_window: ▲0}\n", "more than 0"),
    "an interval of no time": ("+health: {ejection: {outliers: {interval: ▲0s}}}\n", "more than 0"),
    "hedging at once": ("models: [{name: m, hedging: {after: ▲0}, workers: [{" + URL + "}]}]\n", "every request twice"),
    "hedging of a stage at once": ("+stages: {s: {hedging: {after: ▲0ms}}}\n", "every request twice"),
    "a percentile that is none": (
        "models: [{name: m, hedging: {after: ▲p97}, workers: [{" + URL + "}]}]\n",
        "`p95`",
    ),
    "hedging after a misspelt time": (
        "models: [{name: m, hedging: {after: ▲1sec}, workers: [{" + URL + "}]}]\n",
        "`1s`",
    ),
    "more second attempts than requests": (
        "models: [{name: m, hedging: {budget: ▲1.5}, workers: [{" + URL + "}]}]\n",
        "from 0 to 1",
    ),
    "a first ejection above the longest": ("+health: {ejection: {base: ▲10m}}\n", "base ≤ max", "5m"),
    "buckets in disorder": (W + URL + ", capabilities: {prefill_buckets: [512, ▲256]}}]}]\n", "rising order", "512"),
    "contexts in disorder": (CAN + "{decode_context_buckets: [512, ▲512]}}]}]\n", "rising order"),
    "a bucket of nothing": (CAN + "{prefill_buckets: [▲0, 512]}}]}]\n", "at least 1"),
    "segments that cut blocks": (
        CAN + "{block_size: 32, segment_size: ▲1000}}]}]\n",
        "no multiple of the block of 32;",
        "such as 992",
    ),
    "segments that cut the profile's blocks": (
        CAN + "{profile: trn2-70b, segment_size: ▲1000}}]}]\n",
        "from the profile trn2-70b",
    ),
    "a cache that is too small": (
        CAN + "{kv_capacity_tokens: ▲1000, max_model_len: 8192}}]}]\n",
        "8192 tokens",
        "lower `max_model_len`",
    ),
    "a length above the profile's cache": (
        CAN + "{profile: inf2-8b, max_model_len: ▲131072}}]}]\n",
        "65536 tokens, from the profile inf2-8b",
    ),
    "a context above the longest": (
        CAN + "{max_model_len: 8192, decode_context_buckets: [4096, ▲16384]}}]}]\n",
        "remove the bucket",
    ),
    "Medusa in a batch": (
        W + URL + ", driver: neuron, capabilities: {decoder: medusa, slots: ▲4}}]}]\n",
        "one request at a time",
        "remove `slots`",
    ),
    "tokens that a plain decoder has not": (CAN + "{decoder: plain, tokens_per_step: ▲2.5}}]}]\n", "speculative"),
    "a budget without chunks": (
        CAN + "{prefill: exclusive, max_num_batched_tokens: ▲8192}}]}]\n",
        "prefill: chunked",
    ),
    "a budget below the batch": (
        CAN + "{slots: 256, max_num_batched_tokens: ▲256}}]}]\n",
        "more than the 256 slots",
    ),
    "a rate of nothing": (CAN + "{prefill_rate: ▲0}}]}]\n", "at least 1"),
    "fewer tokens than steps": (CAN + "{tokens_per_step: ▲0.5}}]}]\n", "at least 1"),
    "no room for a body": ("+limits: {body: ▲0}\n", "at least 1"),
    "no room for a header": ("+limits: {header: ▲10}\n", "at least 1024"),
    "a file exporter without file": ("+telemetry: {traces: {exporter: ▲file}}\n", "`file:`"),
    "a host with a space": ('+listen: {host: ▲"a b"}\n', "host name"),
    "a header with a line break": ('+telemetry: {traces: {headers: {a: ▲"b\\nc"}}}\n', "no header can carry"),
    "a header with a bad name": ('+telemetry: {traces: {headers: {"a b": ▲c}}}\n', "valid name"),
    "an api key with a line break": (W + URL + ', api_key: ▲"k\\n"}]}]\n', "line break around it"),
    "an empty api key": (W + URL + ', api_key: ▲""}]}]\n', "key is empty"),
    "a name with a line break": ('models: [{name: ▲"a\\nb", workers: [{' + URL + "}]}]\n", "unprintable"),
    # hints
    "an unknown hint driver": (W + URL + ", hints: {driver: ▲kv-hint}}]}]\n", "no hint driver", "kv-hints"),
    "an unknown hint driver in a list": (W + URL + ", hints: {driver: [warm, ▲lmcash]}}]}]\n", "no hint driver"),
    "auto among others": (W + URL + ", hints: {driver: [▲auto, warm]}}]}]\n", "stands alone"),
    "a hint driver twice": (W + URL + ", hints: {driver: [warm, ▲warm]}}]}]\n", "remove one"),
    "no hint driver at all": (W + URL + ", hints: {driver: ▲[]}}]}]\n", "none"),
    "a hint server without a scheme": (W + URL + ", hints: {url: ▲10.0.0.7:8080}}]}]\n", "http://10.0.0.7:8080"),
    "an unknown rule": ("+residency: {rules: {▲retian: false}}\n", "retain"),
    "a rule that is a number": ("+residency: {rules: {retain: ▲3}}\n", "retain"),
    # variables
    "a variable that is not set": ('+telemetry: {service_name: "a-▲${NOPE}"}\n', "NOPE is not set", "${NOPE:-default}"),
    "a variable in another case": ("+grace: ▲${set}\n", "set is not set", "SET is"),
    "a variable without end": ('+telemetry: {service_name: "▲${SET"}\n', "is no variable", "$${"),
    "a variable with a bad name": ("+grace: ▲${1A}\n", "is no variable"),
    "a variable of a wrong type": ("+grace: ▲${SET}\n", "duration", "the value of ${SET}"),
    "an empty variable for a key": (W + URL + ', api_key: ▲"${EMPTY}"}]}]\n', "is its variable set to nothing?"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_reported_once_at_its_place_with_a_remedy(name, minimal, problems_of):
    text, *words = CASES[name]
    if text.startswith("+"):
        text = minimal + text[1:]
    before, _, after = text.partition("▲")
    place = (before.count("\n") + 1, len(before) - before.rfind("\n"))
    problems = problems_of(before + after, SET="word", EMPTY="")
    assert [(problem.mark.line, problem.mark.column) for problem in problems] == [place], [str(p) for p in problems]
    assert str(problems[0]).startswith(f"config.yaml:{place[0]}:{place[1]}: ")
    for word in words:
        assert word in str(problems[0])


def test_all_mistakes_of_a_file_are_reported_in_the_order_of_its_lines(problems_of):
    text = """\
lisen: {port: 1}
models:
  - name: m
    policy: nosuch
    workers:
      - {url: "a:1", driver: vlm}
      - {url: "http://b:1", api_key: "${NOPE}", capabilities: {role: encode, slots: 0}}
policies:
  p:
    filters: [{type: healty}, {type: healthy, weight: 2}]
    scorers: [{type: session, parameters: {heder: a, coockie: b}}, {type: 3}, {type: in-flight, weight: x}]
    picker: {type: lowest}
grace: soon
grace: 3
"""
    places = [(p.mark.line, p.path) for p in problems_of(text)]
    assert places == [
        (1, "lisen"),
        (4, "models[0].policy"),
        (6, "models[0].workers[0].url"),
        (6, "models[0].workers[0].driver"),
        (7, "models[0].workers[1].api_key"),
        (7, "models[0].workers[1].capabilities.role"),
        (7, "models[0].workers[1].capabilities.slots"),
        (10, "policies.p.filters[0].type"),
        (10, "policies.p.filters[1].weight"),
        (11, "policies.p.scorers[0].parameters.heder"),
        (11, "policies.p.scorers[0].parameters.coockie"),
        (11, "policies.p.scorers[1].type"),
        (11, "policies.p.scorers[2].weight"),
        (12, "policies.p.picker.type"),
        (13, "grace"),
        (14, "grace"),
    ]


def test_a_mistake_in_a_thousand_workers_is_written_out_a_hundred_times(problems_of):
    from gateway.config.problems import ConfigError

    workers = "".join(f'  - {{url: "http://a:{port}", dirver: vllm}}\n' for port in range(1, 1001))
    problems = problems_of(f"models:\n- name: m\n  workers:\n{workers}")
    assert len(problems) == 1000
    shown = str(ConfigError(problems)).splitlines()
    assert len(shown) == 301
    assert shown[-1] == "... and 900 more"


def test_the_line_is_shown_with_a_caret_below_the_place(minimal, problems_of):
    shown = str(problems_of(f"{minimal}pool: {{idel: 3}}\n")[0]).splitlines()
    assert shown[1:] == ["    2 | pool: {idel: 3}", "      |        ^"]


def test_a_long_line_is_shown_in_part_with_the_caret_still_below_the_place(minimal, problems_of):
    _, line, caret = str(problems_of(f"{minimal}pool: {{{' ' * 500}idel: 3{' ' * 500}}}\n")[0]).splitlines()
    assert len(line) < 120
    assert line[caret.index("^") :].startswith("idel")


def test_an_alias_bomb_is_refused_without_expanding_it(minimal, problems_of):
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    problems = problems_of(
        f"{minimal}policies:\n  p:\n    preset: session\n    parameters:\n"
        + "".join(f"      {line}\n" for line in bomb.splitlines())
    )
    assert any("use fewer aliases" in problem.message for problem in problems)


@pytest.mark.parametrize("deep", ["[" * 50 + "]" * 50, "[" * 900 + "]" * 900, "[" * 100_000, "{a: " * 5000])
def test_deep_nesting_is_refused(deep, minimal, problems_of):
    assert any("deep" in problem.message for problem in problems_of(f"{minimal}pool: {deep}\n"))


def test_a_repeated_anchor_is_fine_where_it_is_no_bomb(minimal):
    from gateway.config.load import loads

    config = loads(
        "models:\n- name: m\n  workers:\n  - {url: http://a, capabilities: &c {slots: 4}}\n  - {url: http://b, capabilities: *c}\n"
    )
    assert [worker.capabilities.slots for worker in config.models[0].workers] == [4, 4]


def test_a_mistake_in_an_aliased_value_is_reported_once(problems_of):
    workers = "".join(f"  - {{url: http://a:{port}, capabilities: *c}}\n" for port in range(1, 9))
    text = "models:\n- name: m\n  workers:\n  - {url: http://a, capabilities: &c {slots: 0}}\n" + workers
    assert [problem.path for problem in problems_of(text)] == ["models[0].workers[0].capabilities.slots"]


def test_one_server_may_serve_two_models():
    from gateway.config.load import loads

    config = loads(
        "models:\n- {name: m, workers: [{url: http://a}]}\n- {name: n, workers: [{url: http://a, model: x}]}\n"
    )
    assert len(config.models) == 2


@pytest.mark.parametrize(
    "text",
    [
        "api_key: sk-12345678",
        'api_key: "sk-12345678',
        "telemetry: {traces: {headers: {x-team: sk-12345678, b: {}}}}",
        "models: [{name: m, workers: [{apikey: sk-12345678}]}]",
        "models: [{name: m, workers: [{api_key: [sk-12345678]}]}]",
        'models: [{name: m, workers: [{url: "http://a", api_key: "sk-12345678\\n"}]}]',
        'models: [{name: m, workers: [{url: "http://a", api_key: 12345678}]}]',
        'models: [{name: m, workers: [{url: "http://u:sk-12345678@a"}]}]',
        'models: [{name: m, workers: [{url: "http://a", api_key: "${KEY}\\n"}]}]',
        'models: [{name: m, workers: [{url: "http://a", api_key: "${NOPE:-sk-12345678}\\n"}]}]',
    ],
)
def test_a_complaint_never_shows_a_secret(text, problems_of):
    shown = "\n".join(str(problem) for problem in problems_of(text + "\nx: 1\n", KEY="sk-12345678"))
    assert "12345678" not in shown
