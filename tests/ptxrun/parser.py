"""PTX text -> kernels: declarations, labels and unresolved instructions."""

from __future__ import annotations

import re
from collections import ChainMap

import numpy as np

from .ptxtypes import DTYPE, UINT, PtxError, size_of


class Var:
    """A declared variable or parameter; ``addr`` is its offset in its state space once that is laid out."""

    def __init__(self, space, name, size, align, ty, init=None):
        self.space, self.name, self.size, self.align, self.ty, self.init = space, name, size, align, ty, init
        self.addr = None


class Inst:
    """One instruction.

    Attributes, from the parser: ``op`` (mnemonic), ``mods`` (what follows it after dots), ``guard`` (negated?,
    predicate) or None, ``args`` (operand texts), ``scope`` (register names -> numbers, path of enclosing braces).
    From the linker: ``run`` (closure), ``ctl`` (None, or how the scheduler handles it), ``why`` (with ctl "bad": the
    error it raises when reached), ``srcs`` and ``dsts`` (register numbers), ``gi`` (guard's register), ``strict``
    (operands must be defined).
    """

    def __init__(self, line, text, op, mods, guard, args, scope):
        self.line, self.text, self.op, self.mods, self.guard = line, text, op, mods, guard
        self.args, self.scope = args, scope
        self.run = self.ctl = self.why = self.gi = None
        self.srcs, self.dsts, self.strict, self.sync = [], [], False, False

    @property
    def types(self):
        """The type modifiers, in order."""
        return [m for m in self.mods if m in DTYPE]


class Kernel:
    """One .entry: parameters with their offsets, registers (a numpy type each), code."""

    def __init__(self, name):
        self.name, self.params, self.vars, self.regs, self.code = name, [], {}, [], []
        self.param_size, self.maxntid, self.reqntid = 0, None, None
        self.labels, self.tables = {}, {}


_ATTRIBUTES = r"\s*\.ptr\s*\.\w+|\s*\.ptr|\s*\.align\s+\d+"
_VAR = re.compile(
    rf"(?:\.extern|\.visible|\.weak|\.common|\s)*\.(param|shared|local|global|const)((?:{_ATTRIBUTES}|\s*\.v[24])*)"
    rf"\s*\.([a-z]\w*)((?:{_ATTRIBUTES})*)\s+([\w$.%]+)\s*((?:\[[^\]]*\])*)\s*(?:=\s*(.*))?$",
    re.DOTALL,
)


def parse_var(text, line):
    """A declaration without its semicolon -> Var."""
    m = _VAR.match(text.strip())
    if not m:
        raise PtxError(f"line {line}: cannot parse declaration: {text.strip()}")
    space, before, ty, after, name, dims, init = m.groups()
    if ty not in DTYPE:
        raise PtxError(f"line {line}: type .{ty} is not supported: {text.strip()}")
    size = size_of(ty)
    align = re.search(r"\.align\s+(\d+)", before)
    if align is None and ".ptr" not in before + after:  # behind .ptr it is the alignment of what is pointed to
        align = re.search(r"\.align\s+(\d+)", after)
    vector = re.search(r"\.v([24])", before)
    count = int(vector.group(1)) if vector else 1
    for dim in re.findall(r"\[([^\]]*)\]", dims):
        count *= int(dim, 0) if dim.strip() else 0
    return Var(space, name, size * count, int(align.group(1)) if align else size, ty, init)


def parse_imm(text, ty):
    """A literal -> int or numpy float; ValueError if it is none."""
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        value = np.uint32(int(text[2:], 16)).view(np.float32)
        return np.float64(value) if ty == "f64" else value
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return np.uint64(int(text[2:], 16)).view(np.float64)
    if re.fullmatch(r"[-+]?\d*\.\d+(?:[eE][-+]?\d+)?|[-+]?\d+(?:\.\d*)?[eE][-+]?\d+", text):
        return np.float64(text)
    digits = text.lstrip("+-").rstrip("uU")
    value = int(digits, 8) if re.fullmatch(r"0[0-7]+", digits) else int(digits, 0)
    return -value if text.startswith("-") else value


def split_args(text):
    """Splits at the commas outside brackets."""
    out, depth, buf = [], 0, ""
    for c in text:
        depth += (c in "{[(") - (c in "}])")
        if c == "," and depth == 0:
            out.append(buf.strip())
            buf = ""
        else:
            buf += c
    return [*out, buf.strip()] if buf.strip() else out


def statements(text, line):
    """Yields (line, kind, text) with kind in stmt, open, close, label; ``text`` starts at the given line."""
    buf, start, depth, i = "", line, 0, 0
    while i < len(text):
        c = text[i]
        if c == "\n":
            line += 1
        if not buf.strip():
            start = line
            if c in "{}":
                yield line, "open" if c == "{" else "close", c
                buf, i = "", i + 1
                continue
        buf += c
        if c == "{":
            depth += 1
        elif c == "}":
            depth -= 1
        elif c == ";" and depth == 0:
            yield start, "stmt", buf.strip()[:-1].strip()
            buf = ""
        elif c == ":" and depth == 0 and text[i + 1 : i + 2] != ":" and re.fullmatch(r"\s*[\w$%]+:", buf):
            yield start, "label", buf.strip()[:-1]
            buf = ""
        elif c == "\n" and re.match(r"\s*\.(loc|file|pragma)\b[^;]*\n$", buf):  # these end at the line's end
            buf = ""
        i += 1
    if buf.strip() and not re.match(r"\s*\.loc\b", buf):
        yield start, "stmt", buf.strip()


def _match_brace(text, i):
    depth = 0
    while True:
        depth += (text[i] == "{") - (text[i] == "}")
        i += 1
        if depth == 0:
            return i


_HEAD = re.compile(r"\s*(?:\.(?:version|target|address_size)[^\n]*\n|\.file[^\n]*\n|\.section\s+\S+\s*(?=\{)|;)")
_FUNCTION = re.compile(r"\s*((?:\.(?:visible|weak|extern)\s+)*)\.(entry|func)\b")


def parse_module(text):
    """PTX -> (info: version and target, {name: Kernel}, {name: Var} of the module's own variables)."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", "", text)
    info = {k: (re.search(rf"^\s*\.{k}\s+(\S+)", text, re.MULTILINE) or [None, None])[1] for k in ("version", "target")}
    kernels, module_vars, i = {}, {}, 0
    while i < len(text):
        m = _HEAD.match(text, i)
        if m:
            i = _match_brace(text, m.end()) if ".section" in m.group() else m.end()
            continue
        if not text[i:].strip():
            break
        m = _FUNCTION.match(text, i)
        if m:
            brace = text.find("{", m.end())
            end = text.find(";", m.end())
            if 0 <= end < brace or brace < 0:  # a prototype
                i = end + 1
                continue
            end = _match_brace(text, brace)
            if m.group(2) == "entry":
                k = parse_entry(text[m.end() : brace], text[brace:end], text.count("\n", 0, brace) + 1)
                kernels[k.name] = k
            i = end
            continue
        end = i
        while text[end] != ";":
            end = _match_brace(text, end) if text[end] == "{" else end + 1
        v = parse_var(text[i:end], text.count("\n", 0, end) + 1)
        module_vars[v.name] = v
        i = end + 1
    return info, kernels, module_vars


def parse_entry(head, body, line):
    """The text between .entry and the brace, and the body from the brace on -> Kernel."""
    m = re.match(r"\s*([\w$]+)\s*(?:\((.*?)\))?(.*)$", head, re.DOTALL)
    k = Kernel(m.group(1))
    for text in split_args(m.group(2) or ""):
        v = parse_var(text, line)
        v.addr = (k.param_size + v.align - 1) // v.align * v.align
        k.param_size = v.addr + v.size
        k.params.append(v)
        k.vars[v.name] = v
    for what in ("maxntid", "reqntid"):
        r = re.search(rf"\.{what}\s+([\d,\s]+)", m.group(3))
        if r:
            setattr(k, what, int(np.prod([int(x) for x in r.group(1).split(",")])))
    # Scopes share their registers' names: a copy for each of nvcc's 30,000 instructions would be quadratic.
    names, path, n_scopes = ChainMap(), (), 0
    pending = None  # a label that may head a .branchtargets
    for at, kind, text in statements(body, line):
        if kind == "open":
            n_scopes += 1
            path += (n_scopes,)
            names = names.new_child()
        elif kind == "close":
            path = path[:-1]
            names = names.parents
        elif kind == "label":
            k.labels[path, text] = len(k.code)
            pending = (path, text)
        elif text.startswith(".reg"):
            _declare_registers(k, names, text, at)
        elif text.startswith(".branchtargets"):
            k.tables[pending] = [x.strip() for x in text[14:].split(",")]
        elif re.match(r"\.(loc|pragma|file|callprototype|alias)\b", text):
            pass
        elif text.startswith("."):
            v = parse_var(text, at)
            k.vars[v.name] = v
        else:
            k.code.append(_parse_instruction(text, at, (names, path)))
    return k


def _declare_registers(k, names, text, line):
    m = re.match(r"\.reg\s*\.(\w+)\s+(.*)$", text, re.DOTALL)
    ty = m.group(1)
    if ty not in DTYPE:
        raise PtxError(f"line {line}: register type .{ty} is not supported: {text}")
    have = np.bool_ if ty == "pred" else UINT[size_of(ty)]  # registers are bits; operations give them a type
    for name in split_args(m.group(2)):
        many = re.match(r"([\w$%]+)<(\d+)>", name)
        for n in [many.group(1) + str(j) for j in range(int(many.group(2)))] if many else [name]:
            names[n] = len(k.regs)
            k.regs.append(have)


def _parse_instruction(text, line, scope):
    m = re.match(r"(?:@(!?)([\w$%]+)\s+)?([a-z][\w.:]*)\s*(.*)$", text, re.DOTALL)
    if not m:
        raise PtxError(f"line {line}: cannot parse: {text}")
    negated, predicate, opcode, operands = m.groups()
    op, *mods = opcode.replace("::", "~").split(".")  # shared::cta is one modifier
    guard = (negated == "!", predicate) if predicate else None
    return Inst(line, " ".join(text.split()), op, mods, guard, split_args(operands), scope)
