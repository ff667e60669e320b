#include <algorithm>
#include <array>
#include <utility>

#include "grammar/schema_text.h"

namespace freshet::grammar {
namespace {

#define FRESHET_DATE                                                                 \
  "(\\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\\d|3[01])|(0[469]|11)-(0[1-9]|[12]\\d|30)" \
  "|02-(0[1-9]|1\\d|2[0-8]))"                                                        \
  "|(\\d\\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
#define FRESHET_TIME \
  "([01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(\\.\\d{1,18})?([Zz]|[+-]([01]\\d|2[0-3]):[0-5]\\d)"
#define FRESHET_OCTET "(25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)"
#define FRESHET_IPV4 FRESHET_OCTET "(\\." FRESHET_OCTET "){3}"
#define FRESHET_H16 "[0-9a-fA-F]{1,4}"
#define FRESHET_LS32 "(" FRESHET_H16 ":" FRESHET_H16 "|" FRESHET_IPV4 ")"
#define FRESHET_IPV6                                                                              \
  "(" FRESHET_H16 ":){6}" FRESHET_LS32 "|::(" FRESHET_H16 ":){5}" FRESHET_LS32 "|(" FRESHET_H16   \
  ")?::(" FRESHET_H16 ":){4}" FRESHET_LS32 "|((" FRESHET_H16 ":){0,1}" FRESHET_H16                \
  ")?::(" FRESHET_H16 ":){3}" FRESHET_LS32 "|((" FRESHET_H16 ":){0,2}" FRESHET_H16                \
  ")?::(" FRESHET_H16 ":){2}" FRESHET_LS32 "|((" FRESHET_H16 ":){0,3}" FRESHET_H16                \
  ")?::" FRESHET_H16 ":" FRESHET_LS32 "|((" FRESHET_H16 ":){0,4}" FRESHET_H16 ")?::" FRESHET_LS32 \
  "|((" FRESHET_H16 ":){0,5}" FRESHET_H16 ")?::" FRESHET_H16 "|((" FRESHET_H16                    \
  ":){0,6}" FRESHET_H16 ")?::"
// Labels without "--" as third and fourth character, which would mark Punycode; only a few labels
// may be long, so that the whole name stays within 253 characters.
#define FRESHET_ALNUM "[a-zA-Z0-9]"
#define FRESHET_LDH "[a-zA-Z0-9-]"
#define FRESHET_LABEL(most)                                                                 \
  FRESHET_ALNUM "(" FRESHET_ALNUM "|" FRESHET_LDH FRESHET_ALNUM                             \
                "|" FRESHET_LDH FRESHET_LDH FRESHET_ALNUM "|" FRESHET_LDH                   \
                "(" FRESHET_ALNUM FRESHET_LDH "|-" FRESHET_ALNUM ")" FRESHET_LDH "{0," most \
                "}" FRESHET_ALNUM ")?"
#define FRESHET_LONG FRESHET_LABEL("58")
#define FRESHET_SHORT FRESHET_LABEL("25")
#define FRESHET_HOST \
  "(" FRESHET_LONG "(\\." FRESHET_LONG "){0,2}|" FRESHET_SHORT "(\\." FRESHET_SHORT "){0,7})"
// As mail programs check it: labels of any length.
#define FRESHET_LOOSE FRESHET_ALNUM "(" FRESHET_LDH "*" FRESHET_ALNUM ")?"
#define FRESHET_DOMAIN FRESHET_LOOSE "(\\." FRESHET_LOOSE ")*"
#define FRESHET_ATOM "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
// RFC 3986.
#define FRESHET_PCHAR "([a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
#define FRESHET_SEGMENT_NC "([a-zA-Z0-9._~!$&'()*+,;=@-]|%[0-9a-fA-F]{2})+"
#define FRESHET_AUTHORITY                              \
  "(([a-zA-Z0-9._~!$&'()*+,;=:-]|%[0-9a-fA-F]{2})*@)?" \
  "(([a-zA-Z0-9._~!$&'()*+,;=-]|%[0-9a-fA-F]{2})*|\\[(" FRESHET_IPV6 ")\\])(:\\d*)?"
#define FRESHET_ABSOLUTE "/(" FRESHET_PCHAR "+(/" FRESHET_PCHAR "*)*)?"
#define FRESHET_TAIL "(\\?(" FRESHET_PCHAR "|[/?])*)?(#(" FRESHET_PCHAR "|[/?])*)?"
#define FRESHET_URI                                                                          \
  "[a-zA-Z][a-zA-Z0-9+.-]*:(//" FRESHET_AUTHORITY "(/" FRESHET_PCHAR "*)*|" FRESHET_ABSOLUTE \
  "|" FRESHET_PCHAR "+(/" FRESHET_PCHAR "*)*|)" FRESHET_TAIL
#define FRESHET_RELATIVE                                                                    \
  "(//" FRESHET_AUTHORITY "(/" FRESHET_PCHAR "*)*|" FRESHET_ABSOLUTE "|" FRESHET_SEGMENT_NC \
  "(/" FRESHET_PCHAR "*)*|)" FRESHET_TAIL

constexpr std::array<std::pair<std::string_view, const char*>, 13> kFormats = {{
    {"date", FRESHET_DATE},
    {"time", FRESHET_TIME},
    {"date-time", "(" FRESHET_DATE ")[Tt](" FRESHET_TIME ")"},
    {"duration",
     "P((\\d+Y(\\d+M(\\d+D)?)?|\\d+M(\\d+D)?|\\d+D)(T(\\d+H(\\d+M(\\d+S)?)?|\\d+M(\\d+S)?|\\d+S))?"
     "|T(\\d+H(\\d+M(\\d+S)?)?|\\d+M(\\d+S)?|\\d+S)|\\d+W)"},
    {"uuid", "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"},
    {"email", FRESHET_ATOM "(\\." FRESHET_ATOM ")*@" FRESHET_DOMAIN},
    {"hostname", FRESHET_HOST},
    {"ipv4", FRESHET_IPV4},
    {"ipv6", FRESHET_IPV6},
    {"uri", FRESHET_URI},
    {"uri-reference", "(" FRESHET_URI ")|" FRESHET_RELATIVE},
    {"json-pointer", "(/([^~/]|~[01])*)*"},
    {"relative-json-pointer", "(0|[1-9]\\d*)(#|(/([^~/]|~[01])*)*)"},
}};

}  // namespace

const char* format_expression(std::string_view format) {
  const auto* found = std::find_if(kFormats.begin(), kFormats.end(),
                                   [&](const auto& f) { return f.first == format; });
  return found == kFormats.end() ? nullptr : found->second;
}

bool is_unsupported_format(std::string_view format) {
  constexpr std::array kOthers = {"idn-email",     "idn-hostname", "iri",
                                  "iri-reference", "uri-template", "regex"};
  return std::find(kOthers.begin(), kOthers.end(), format) != kOthers.end();
}

}  // namespace freshet::grammar
