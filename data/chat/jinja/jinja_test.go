package jinja

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"
)

func render(src string, vars *Dict) (Text, error) {
	t, err := Parse(src)
	if err != nil {
		return Text{}, err
	}
	if vars == nil {
		vars = NewDict()
	}
	return t.Render(vars, nil, DefaultLimits(1000))
}

// The marks of input texts survive what templates do with texts.
func TestMarks(t *testing.T) {
	vars := NewDict()
	vars.Set("a", NewText("  <think>x</think>ä\"b ", 1))
	vars.Set("b", NewText("bb", 2))
	list, err := FromJSON([]byte(`{"k": ["v", 1]}`), 3, 5)
	if err != nil {
		t.Fatal(err)
	}
	vars.Set("c", list)
	for _, c := range []struct{ src, want string }{
		{"{{ a }}", "1:  <think>x</think>ä\"b "},
		{"[{{ a | trim }}]", "0:[|1:<think>x</think>ä\"b|0:]"},
		{"{{ a.split('</think>')[-1].strip() + b }}", "1:ä\"b|2:bb"},
		{"{{ 'x' ~ b ~ 'y' }}", "0:x|2:bb|0:y"},
		{"{{ a[2:5] }}{{ b[::-1] }}{{ b[0] }}", "1:<th|2:bbb"},
		{"{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(b) }}", "0:<|2:bb|0:>"},
		{"{% set s %}{{ b }}!{% endset %}{{ s | upper }}", "2:BB|0:!"},
		{"{{ c | tojson }}", `0:{|3:"k"|0:: [|3:"v"|0:, 1]}`},
		{"{{ a | replace('<think>', '*') }}", "1:  |0:*|1:x</think>ä\"b "},
		{"{{ [b, 'x'] | join(', ') }}", "2:bb|0:, x"},
		{"{% for ch in b %}{{ ch }}-{% endfor %}", "2:b|0:-|2:b|0:-"},
		{"{% set t = b ~ 'ß' %}{{ t | upper }}{{ (b ~ 'ŉİ').lower() }}", "2:BB|0:SS|2:bb|0:ŉi\u0307"},
		{"{{ b | tojson }}{{ (b ~ '\n') | indent }}", "2:\"bb\"bb|0:\n"},
		{"x{% generation %}y{{ b }}{% endgeneration %}z", "0:x|0+:y|2+:bb|0:z"},
	} {
		got, err := render(c.src, vars)
		var parts []string
		got.Runs(func(lo, hi int, m Mark) {
			generated := ""
			if m&Generated != 0 {
				generated = "+"
			}
			parts = append(parts, fmt.Sprintf("%d%s:%s", m&^Generated, generated, got.S[lo:hi]))
		})
		if s := strings.Join(parts, "|"); err != nil || s != c.want {
			t.Errorf("%s: %s, %v; want %s", c.src, s, err, c.want)
		}
	}
}

// Forms that the templates of the goldens do not have render as Jinja2 3.1.6 does.
func TestForms(t *testing.T) {
	vars := NewDict()
	values, err := FromJSON(
		[]byte(`{"s": "it's a foo_bar-baz (qux)", "l": [3, 1, 2], "m": ["b", "A", "a"], "d": {"b": 1}, "large": 12345678901234567890123,
		"x": [{"a": 1}, {"a": 2}, {"a": 1}], "lines": "a\r\nb\u2028\n\nc\n"}`), 0, 5)
	if err != nil {
		t.Fatal(err)
	}
	values.(*Dict).Each(vars.Set)
	for src, want := range map[string]string{
		"{{ 1 ** 9223372036854775807 }} {{ (-1) ** 9223372036854775807 }} {{ 0 ** 3 }} {{ 0 ** 0 }} {{ (-2) ** 63 }} {{ 7 ** 2 }}":                  "1 -1 0 1 -9223372036854775808 49",
		"{{ s | title }}|{{ s.title() }}|{{ s | wordcount }}":                                                                                       "It's A Foo_bar-Baz (Qux)|It'S A Foo_Bar-Baz (Qux)|6",
		"{{ s.find('o', 8) }} {{ s.find('o', 0, 7) }} {{ s.find('', 99) }} {{ s.rfind('a', 0, -8) }} {{ 'äöä'.find('ä', 1) }}":                      "8 -1 -1 12 2",
		"{{ s.count('a', 6) }} {{ s.startswith('a', 5) }} {{ s.endswith('it', 0, 2) }} {{ s.startswith(('x', 'i')) }}":                              "2 True True True",
		"{{ 'ΑΣ ΑΣΒ Σ 1Σ' | lower }} {{ 'ΑΣ.Β Α.Σ ΑΣ\u0301'.lower() }} {{ 'ΣΣ'.capitalize() }} {{ 'ßŉ'.capitalize() }} {{ 'ὈΔΥΣΣΕΎΣ ΟΣ'.title() }}": "ας ασβ σ 1σ ασ.β α.ς ας\u0301 Σς Ssŉ Ὀδυσσεύς Ος",
		"{{ 'ὈΔΥΣΣΕΎΣ ΟΣ (ßA' | title }}":                                                                                                           "Ὀδυσσεύς Οσ (SSa",
		"{% for x in ['²', '2₃', '①', '½', '٣', '⑩', 'Ⅷ', '', '፩', '一'] %}{{ x.isdigit() }} {% endfor %}":                                           "True True True False True False False False True False ",
		"{{ range(3) }} {{ range(1, 9, 2) }} {{ [range(9)[::-2], range(5)[7:]] }} {{ range(2) | list }}":                                            "range(0, 3) range(1, 9, 2) [range(8, -1, -2), range(5, 5)] [0, 1]",
		"{{ range(2) == [0, 1] }} {{ range(0, 3, 2) == range(0, 4, 2) }} {{ [range(2)] == [range(2)] }}":                                            "False True True",
		"{{ d.keys() }} {{ d.values() }} {{ d.items() }}":                                                                                           "dict_keys(['b']) dict_values([1]) dict_items([('b', 1)])",
		"{{ {'a': 1, 'b': 2}.keys() == {'b': 3, 'a': 4}.keys() }} {{ d.keys() == ['b'] }} {{ d.keys() == {'c': 1}.keys() }}":                        "True False False",
		"{{ d.values() == d.values() }} {{ {'a': [1]}.items() == {'a': [1.0]}.items() }} {{ d.items() == d.keys() }}":                               "False True False",
		"{{ 'straße ﬁ ǰ ΐ' | upper }} {{ 'ÄÖİ'.lower() }}":                                                                                          "STRASSE FI J\u030c \u0399\u0308\u0301 äöi\u0307",
		"{{ l | sum(start=10) }} {{ x | sum('a') }} {{ x | sum(attribute='a', start=1) }}":                                                          "16 4 5",
		"{{ (x | max(attribute='a')).a }} {{ m | min(true) }} {{ m | min }}":                                                                        "2 A A",
		"{{ m | unique | list }} {{ m | unique(true) | list }} {{ x | unique(attribute='a') | list }}":                                              "['b', 'A'] ['b', 'A', 'a'] [{'a': 1}, {'a': 2}]",
		"{{ lines | indent(2) | tojson }} {{ lines | indent(2, true, true) | tojson }} {{ '' | indent(first=true) }}|":                              `"a\n  b\n\n\n  c\n" "  a\n  b\n  \n  \n  c\n  "     |`,
		"{{ lines.splitlines() }} {{ lines.splitlines(true) | length }}":                                                                            "['a', 'b', '', '', 'c'] 5",
		"{{ 1e20 | int }} {{ '123456789012345678901' | int }} {{ 'x' | int(4) }} {{ '-7' | int }}":                                                  "100000000000000000000 123456789012345678901 4 -7",
		"{{ '0x1p4' | float }} {{ '0x1p4' | int }} {{ '1e400' | float }} {{ '-1e400' | int(3) }}":                                                   "0.0 0 inf 3",
		"{% for x in ['ß', 'aß', 'ª', 'ʰ', 'Aß', '1', 'ⓐ'] %}{{ x is lower }} {% endfor %}":                                                         "True True True True False False True ",
		"{% for x in ['ẞ', 'AB1', 'ǅ', 'Ⅷ', 'Ab', ''] %}{{ x is upper }} {% endfor %}":                                                              "True True False True False False ",
		"{{ {(1,): 'a', '(1,)': 'b'} }} {{ {(1, 'x'): 'a'}[(1.0, 'x')] }} {{ {((true,), none): 2}[((1,), none)] }}":                                 "{(1,): 'a', '(1,)': 'b'} a 2",
		"{{ {('a', 'b'): 1}[('a, b',)] is defined }} {{ {(1,): 1}[('1',)] is defined }} {{ [(1, 2), (1.0, 2)] | unique | list }}":                   "False False [(1, 2)]",
		"{{ '%d' % 3.7 }} {{ '%s-%d' % ('a', true) }} {{ 'a' % {} }}":                                                                               "3 a-1 a",
		"{{ l | select('>', 1) | list }} {{ x | rejectattr('a', '==', 1) | list }} {{ l | select('<=', 2) | list }}":                                "[3, 2] [{'a': 2}] [1, 2]",
		"{% if x | selectattr('a', 'eq', 9) %}an iterator is true{% endif %}":                                                                       "an iterator is true",
		"{% set g = x | map(attribute='a') %}{{ g | first }} {{ g | list }} {{ g | list }}":                                                         "1 [2, 1] []",
		"{{ [x, x[:1]] | map('sum', attribute='a') | list }} {{ [x] | map('join', '-', attribute='a') | list }}":                                    "[4, 1] ['1-2-1']",
		"[{{ (l | reverse)[0] }}{{ d.keys()[0] }}] {{ d.keys() | first }} {{ d.items() | length }}":                                                 "[] b 1",
		"{{ d.items() is sequence }} {{ x | map('length') is iterable }}":                                                                           "False True",
		"{{ no is callable }} {{ none is callable }} {{ range is callable }} {{ s.upper is callable }}":                                             "True False True True",
		"{% for a in l %}{% set b %}{% if a == 1 %}{% break %}{% endif %}{{ a }}{% endset %}{{ b }}{% endfor %}":                                    "3",
		"{% for a in l %}{{ a }}{% break %}{% else %} no body ended{% endfor %}":                                                                    "3 no body ended",
		"{% for a in l %}{% if a > 1 %}{% continue %}{% endif %}{{ a }}{% else %}!{% endfor %}":                                                     "1",
		"{% for a in l %}{{ a }}{% for b in [] %}{% else %}{% break %}{% endfor %}x{% endfor %}":                                                    "3",
		"{% for a in l %}{{ a }}{% for b in [] %}{% else %}{% continue %}{% endfor %}x{% endfor %}":                                                 "312",
		"{{ 1.0 // 0.1 }} {{ 1.0 % 0.1 }} {{ -7.5 // 2 }} {{ -7.5 % 2 }} {{ 7.5 % -2 }} {{ -6.0 % 3 }} {{ 3 % -0.5 }} {{ 0.5 // -2 }}":              "9.0 0.09999999999999995 -4.0 0.5 -0.5 0.0 -0.0 -1.0",
		"{{ 1e308 // 1e-3 }} {{ -1 // 1e308 }} {{ 5.0 % (1e308 * 10) }} {{ -5.0 % (1e308 * 10) }} {{ 0.0 // -1 }}":                                  "inf -1.0 5.0 inf -0.0",
		"{{ true | round }} {{ false | round(1) }} {{ 1.25 | round(1, 'common') }} {{ large | float }}":                                             "1 0 1.2 1.2345678901234568e+22",
		"{% raw %}\n a {% endraw %}\n b": "\n a  b",
		"{{ '\n\n\n'.rsplit('\n\n', 1) }} {{ 'aaa'.rsplit('aa') }} {{ 'a,b,c'.rsplit(',', 1) }}":  `['\n', ''] ['a', ''] ['a,b', 'c']`,
		"{{ ' a b '.rsplit(none, 1) }} {{ ' a b '.split(none, 1) }} {{ ' a '.rsplit(none, 1) }}":  "[' a', 'b'] ['a', 'b '] ['a']",
		"x{% raw %}  {% endraw %}y|{% raw %}\n  {% endraw %}y|{% raw %}\n  {%+ endraw %}y":        "x  y|\ny|\n  y",
		"{% raw %}a\n {% endraw +%}\ny|{% raw %}a {%- endraw +%}\ny|{% raw %}a {%- endraw -%}\ny": "a\n\ny|a\ny|ay",
	} {
		if got, err := render(src, vars); err != nil || got.S != want {
			t.Errorf("%s: %q, %v; want %q", src, got.S, err, want)
		}
	}
}

// A template that does not end, or that wants all memory, is refused.
func TestTemplatesThatDoNotEnd(t *testing.T) {
	const doubled = "{% set ns = namespace(s=[1], t=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}" +
		"{% set ns.t = [ns.t, ns.t] %}{% endfor %}"
	nested := strings.Repeat("(", 10_000) + "1" + strings.Repeat(")", 10_000)
	for _, src := range []string{
		"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
		"{% for a in range(100001) %}{% endfor %}",
		"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
		"{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
		"{{ 'x' * 1000000000000 }}", "{{ [1] * 1000000000000 }}", "{{ 2 ** 64 }}", "{{ 9223372036854775807 + 1 }}",
		"{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
		"{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s | replace('x', 'xx') %}{% endfor %}",
		"{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
		"{% set ns = namespace(s=[1]) %}{% for i in range(900) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s | tojson }}",
		"{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
		// products that are no 64-bit integers
		"{{ [1] * 9223372036854775807 }}", "{{ [1, 2, 3] * 4611686018427387904 }}",
		// lists with 2^60 elements, which share their memory
		doubled + "{{ ns.s }}", doubled + "{{ ns.s ~ 1 }}", doubled + "{{ ns.s == ns.t }}",
		doubled + "{{ ns.s < ns.t }}",
		doubled + "{{ ns.t in [ns.s] }}", doubled + "{{ {(ns.s,): 1} }}", doubled + "{{ {}[(ns.s,)] }}",
		doubled + "{{ [ns.s, ns.t] | sort }}", doubled + "{{ '%s' % [ns.s] }}", doubled + "{{ [ns.s] | join }}",
		// long texts in between
		"{{ ([1] * 10000) | tojson(indent='x' * 100000) }}",
		"{{ ([1] * 10000) | tojson(separators=('x' * 100000, ':')) }}",
		"{{ ('%s' * 10000) % (('x' * 10000,) * 10000) }}", "{{ ['x' * 10000] * 10000 }}",
		"{% set s = 'x' * 4000000 %}{% for i in range(99999) %}{% if s.isdigit() %}{% endif %}{% endfor %}",
		"{% set s = 'x' * 4000000 %}{% for i in range(99999) %}{% if s is lower %}{% endif %}{% endfor %}",
		"{% set s = 'x' * 400000 %}{% for i in range(99999) %}{% if s[0] %}{% endif %}{% endfor %}",
		"{% set s = 'x' * 400000 %}{% set d = {s: 1} %}{% for i in range(99999) %}{% if d[s] %}{% endif %}{% endfor %}",
		"{{ (['x' * 1000000] * 50000) | sort | length }}",
		"{{ " + nested + " }}", "{{ " + strings.Repeat("-", 10_000) + "1 }}",
		"{{ " + strings.Repeat("not ", 10_000) + "1 }}", strings.Repeat("{% if 1 %}", 10_000),
		strings.Repeat("{% if 1 %}{% elif 1 %}", 10_000),
		strings.Repeat("x", maxSource+1),
		"{% for i in range(99999) %}{{ 'x' | indent(1024, first=true) }}{% endfor %}",
	} {
		if got, err := render(src, nil); err == nil {
			t.Errorf("%.60s: %d bytes; want an error", src, len(got.S))
		}
	}
}

// Neighbouring strings are joined once.
func TestManyStrings(t *testing.T) {
	src := "{{ " + strings.Repeat("'a' ", 100_000) + "}}"
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if got, err := render(src, nil); err != nil || len(got.S) != 100_000 {
		t.Errorf("%d bytes, %v", len(got.S), err)
	}
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 100<<20 {
		t.Errorf("%d bytes were allocated", n)
	}
}

// strftime_now has no time zone, as Python's datetime.now().
func TestTimeZone(t *testing.T) {
	template, err := Parse("{{ strftime_now('%H:%M|%Z|%z') }}")
	if err != nil {
		t.Fatal(err)
	}
	now := func() time.Time { return time.Date(2026, 3, 9, 8, 5, 7, 0, time.FixedZone("CET", 3600)) }
	if got, err := template.Render(NewDict(), now, DefaultLimits(0)); err != nil || got.S != "08:05||" {
		t.Errorf("%q, %v", got.S, err)
	}
}

// Errors name the line of the template.
func TestErrors(t *testing.T) {
	for src, want := range map[string]string{
		"\n{{ raise_exception('no') }}": `the template raises "no" (line 2 of the template)`,
		"{{ x.y }}":                     `"x" is undefined (line 1`,
		"{{ 1 + 'a' }}":                 "an int + a string is not possible",
		"a\n{% iff x %}":                `the statement "iff" is not supported in chat templates (line 2`,
		"{% include 'x' %}":             `the statement "include" is not supported`,
		"{{ x | foo }}":                 `the filter "foo" is not supported`,
		"{{ x is foo }}":                `the test "foo" is not supported`,
		"{% if 1 %}":                    "{% endif %} is missing",
		"{% endif %}":                   "unexpected {% endif %}",
		"{{ 1 ":                         "a tag has no end",
		"{{ 'a }}":                      "a string has no end",
		"{# x":                          "a comment has no end",
		"{% break %}":                   "break outside of a loop",
		"{{ [].append(1) }}":            "append: a template cannot change its values",
		"{{ {}.update({}) }}":           "update: a template cannot change its values",
		"{% set n = namespace() %}{% set n._x = 1 %}": `a namespace cannot have the attribute "_x"`,
		"{{ namespace(__class__=1) }}":                `a namespace cannot have the attribute "__class__"`,
		"{{ strftime_now('%Y') }}":                    "strftime_now: the template shows the current date",
		"{{ 1 // 0 }}":                                "division by zero",
		"{{ 0 ** -1 }}":                               "division by zero",
		"{{ (-8) ** 0.5 }}":                           "-8 ** 0.5 is not a real number",
		"{{ -(-9223372036854775807 - 1) }}":           "0 - -9223372036854775808 is not a 64-bit integer",
		"{{ (-9223372036854775807 - 1) | abs }}":      "0 - -9223372036854775808 is not a 64-bit integer",
		"{{ 'a' < 1 }}":                               "a string < an int: the two cannot be compared",
		"{{ range }}{{ 1() }}":                        "an int cannot be called",
		"{{ x.__class__.y }}":                         "is undefined",
		"{{ x | int(5) }}":                            `"x" is undefined`,
		"{{ x | float }}":                             `"x" is undefined`,
		"{{ {([],): 1} }}":                            "a tuple cannot be the key of an object",
		"{{ '1f' | int(base=16) }}":                   "int: one of the arguments base is not supported",
		"{{ range(2) | tojson }}":                     "tojson: a range cannot be written as JSON; add the filter list before it",
		"{{ range(2) + [1] }}":                        "a range + a list is not possible",
		"{{ 'a'.upper(1) }}":                          "upper: 1 arguments are not supported, at most 0 are",
		"{{ [2] | map('round', 1, 'floor', 3) }}":     "round: 3 arguments are not supported, at most 2 are",
		"{{ 'a' % 1 }}":                               "has fewer conversions than arguments",
		"{{ 1.5 | round(1, 2) }}":                     "round: the method is not \"common\", \"ceil\" or \"floor\"",
		"{% macro m() %}q{% endmacro %}{% call m() %}x{% endcall %}": "macro m is used by call, and does not use caller",
		"{{ 15 | round(-1) }}":                        "a precision below 0 is not supported",
		"{{ [{}] | map(attribute='a', x=1) | list }}": "map: one of the arguments attribute, x is not supported",
		"{{ [1] | select | length }}":                 "an iterator has no length",
		"{{ [1] | select | last }}":                   "an iterator has no last element",
		"{{ {}.keys() | tojson }}":                    "a view of an object cannot be written as JSON",
		"{{ {}.keys() + [1] }}":                       "a view of an object + a list is not possible",
		"{{ ([1] | reverse)[1:] }}":                   "an iterator cannot be sliced",
		"{{ [1] | indent }}":                          "indent: a list is not a string",
		"{{ none | indent(2) }}":                      "indent: None is not a string",
		"{% for a in [1] %}{% generation %}{% break %}{% endgeneration %}{% endfor %}": "break outside of a loop",
	} {
		_, err := render(src, nil)
		var e *Error
		if !errors.As(err, &e) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %s", src, err, want)
		}
	}
}

// No template makes the parser or a rendering panic.
func FuzzRender(f *testing.F) {
	f.Add("{% for m in messages %}{{ m.role[1:] | trim }}{% endfor %}{% macro a(b=1) %}{{ b }}{% endmacro %}{{ a() }}")
	f.Add("{{ [1, 2][::-1] | tojson(indent=2) }}{{ 'a,b'.split(',', -1) }}{{ 'x'.rsplit() }}{{ {'a': 1}.items() }}")
	f.Add("{%- raw -%}{% endraw %}{{ 1.5e3 // -2 }}{{ 'a'[5:] }}{{ messages[-9] is defined }}{% set a, b = 1, 2 %}")
	f.Fuzz(func(t *testing.T, src string) {
		vars := NewDict()
		v, _ := FromJSON([]byte(`[{"role": "user", "content": "äb", "n": 1.5}]`), 1, 5)
		vars.Set("messages", v)
		template, err := Parse(src)
		if err != nil {
			return
		}
		out, err := template.Render(vars, nil, Limits{Steps: 20_000, Bytes: 1 << 18, Depth: 20})
		at := 0
		out.Runs(func(lo, hi int, _ Mark) {
			if lo != at || hi <= lo {
				t.Fatalf("run [%d, %d) behind %d", lo, hi, at)
			}
			at = hi
		})
		if err == nil && at != len(out.S) {
			t.Fatalf("the runs end at %d of %d", at, len(out.S))
		}
	})
}
