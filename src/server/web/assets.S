// The page's files as they are, between symbols that web_routes.cc names.
  .section .rodata
  .macro asset name, file
  .global freshet_web_\name\()_begin
  .global freshet_web_\name\()_end
freshet_web_\name\()_begin:
  .incbin "\file"
freshet_web_\name\()_end:
  .endm

  asset index, "index.html"
  asset style, "style.css"
  asset icon, "icon.svg"
  asset app, "app.js"
  asset api, "api.js"
  asset chart, "chart.js"
  asset dashboard, "dashboard.js"
  asset markdown, "markdown.js"
  asset message, "message.js"
  asset prometheus, "prometheus.js"
  asset settings, "settings.js"
  asset tokens, "tokens.js"

  .section .note.GNU-stack,"",%progbits
